"""What indexes cost: fits, plans and their checks."""

from __future__ import annotations

import pytest

from irkit.errors import BadValueError
from irkit.planning import costs, plan
from irkit.planning.costs import BUILD, BUILD_MEMORY, BYTES, MEMORY, OPENING, POWERS, QUERY, Line
from irkit.planning.machine_plan import parse_bytes, parse_documents, parse_seconds

LINES = {
    BUILD: Line(100, 2, 0.5, 335_000),
    BYTES: Line(1000, 5e6, -1),
    QUERY: Line(1, 0.01, 0.5),
    BUILD_MEMORY: Line(50, 2e-3, 1, 335_000),
    MEMORY: Line(1, 5e-4, 1),
    OPENING: Line(1, 1, 1),
}


def row(index: str, size: int, **other: float) -> dict:
    return {"index": index, "documents": size} | {cost: line.at(size) for cost, line in LINES.items()} | other


@pytest.fixture
def measured(monkeypatch):
    """Measurements of plaid that lie on the lines."""
    content = {
        "rows": [row("plaid", size) for size in (100_000, 5_000, 10_000)],
        "shards": {"overhead ms": 2.0},
        "measured": "never",
    }
    for module in ("costs", "machine_plan"):
        monkeypatch.setattr(f"irkit.planning.{module}.read_costs", lambda: content)


def test_fits_and_checks(measured: None) -> None:
    rows = costs.rows_of("plaid")
    assert [item["documents"] for item in rows] == [5_000, 10_000, 100_000]
    for cost, power in POWERS["plaid"].items():
        line = costs.fit(rows, cost)
        assert line == pytest.approx(LINES[cost]._replace(power=power), rel=1e-6)
        checked = costs.check(rows, cost)
        assert checked.fitted == (5_000, 10_000)
        assert checked.predicted == pytest.approx(checked.measured)
    assert costs.check(rows[:2], QUERY) is None  # none is ten times as large
    falling = [row("plaid", 10, **{QUERY: 8.0}), row("plaid", 1000, **{QUERY: 2.0})]
    assert min(costs.fit(falling, QUERY)) >= 0


@pytest.mark.parametrize("latency", [None, 0.2, 0.02, 0.0045])
@pytest.mark.parametrize("memory", [1e9, 4e8])
@pytest.mark.parametrize("documents", [1, 9_999, 100_000, 3_456_789, 100_000_000])
def test_the_fewest_machines(measured: None, documents: int, memory: float, latency: float | None) -> None:
    """Of 1 GB the files take most, and of 0.4 GB the build."""

    def enough(machines: int) -> bool:
        size = documents / machines
        milliseconds = LINES[QUERY].at(size) + 2.0 * (machines > 1)
        megabytes = max(
            size * LINES[BYTES].at(size) / 1e6, LINES[BUILD_MEMORY].at(size), LINES[MEMORY].at(size)
        )
        fits = megabytes <= memory / 1e6
        return fits and (latency is None or milliseconds <= 1000 * latency * (1 + 1e-9))

    expected = next((count for count in range(1, max(1, documents // 10_000) + 1) if enough(count)), None)
    if expected is None:
        with pytest.raises(BadValueError, match=r"on [\d,]+ machines a query of plaid takes"):
            plan(documents, "plaid", latency=latency, memory=memory)
        return
    found = plan(documents, "plaid", latency=latency, memory=memory)
    size = documents / expected
    assert (found.machines, found.is_measured) == (expected, documents == 100_000 and expected == 1)
    assert found.bytes == pytest.approx(documents * LINES[BYTES].at(size))
    assert found.build_hours == pytest.approx(size * LINES[BUILD].at(size) / 3.6e9)
    assert found.query_ms == pytest.approx(LINES[QUERY].at(size) + 2.0 * (expected > 1))
    assert found.build_memory == pytest.approx(1e6 * LINES[BUILD_MEMORY].at(size))
    assert found.memory == pytest.approx(1e6 * LINES[MEMORY].at(size))


def test_what_comes_with_irkit() -> None:
    content = costs.read_costs()
    assert content["measured"].startswith("measured ")
    assert set(costs.SHAPES) == set(POWERS)
    assert set(costs.measured_kinds()) <= set(POWERS)
    for index in costs.measured_kinds():
        rows, powers = costs.rows_of(index), POWERS[index]
        for cost in powers:
            assert all(item[cost] >= 0 for item in rows)
            checked = costs.check(rows, cost)
            assert checked is None or checked.documents >= 10 * max(checked.fitted)
        assert plan(rows[0]["documents"], index).is_measured
        small, large = (plan(count, index, latency=0.05) for count in (10_000_000, 1_000_000_000))
        assert 0 < small.bytes < large.bytes
        assert small.machines <= large.machines


def test_amounts() -> None:
    assert [parse_documents(text) for text in ("8.8M", "1b", "250,000", "10_000")] == [
        *(8_800_000, 1_000_000_000, 250_000, 10_000)
    ]
    assert (parse_seconds("50ms"), parse_seconds("0.2 s"), parse_bytes("64GB")) == (0.05, 0.2, 64e9)
    for parse, wrong in ((parse_documents, "-1"), (parse_documents, "1T"), (parse_documents, "8,8M")):
        with pytest.raises(BadValueError, match="expected a number of documents, such as 100M"):
            parse(wrong)
    for wrong in ("50", "50m", "", "1.2.3s"):
        with pytest.raises(BadValueError, match="expected a time, such as 50ms"):
            parse_seconds(wrong)


@pytest.mark.parametrize("query_ms", [3.5, 5.5])
def test_a_measured_machine_decides(query_ms: float, measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        item | {QUERY: query_ms} if item["documents"] == 100_000 else item for item in costs.rows_of("plaid")
    ]
    content = costs.read_costs() | {"rows": rows}
    for module in ("costs", "machine_plan"):
        monkeypatch.setattr(f"irkit.planning.{module}.read_costs", lambda: content)
    predicted = costs.fit(rows, QUERY).at(100_000)
    found = plan(100_000, "plaid", latency=(predicted + query_ms) / 2000)
    assert found.is_measured is (found.machines == 1) is (query_ms < predicted)
    assert not found.is_measured or found.query_ms == query_ms


def test_what_is_refused(measured: None) -> None:
    with pytest.raises(BadValueError, match="index 'plait' was not measured; did you mean 'plaid'"):
        plan(10, "plait")
    with pytest.raises(BadValueError, match="index 'flat' was not measured"):
        plan(10, "flat")
    for wrong in ({"documents": 0}, {"latency": 0.0}, {"memory": -1.0}):
        with pytest.raises(BadValueError, match="above 0"):
            plan(**{"documents": 10, "index": "plaid", **wrong})


def test_command(capsys) -> None:
    from irkit.cli import main

    for latency, code in (("50ms", 0), ("1us", 2), ("soon", 2)):
        with pytest.raises(SystemExit) as stop:
            main(["plan", "--documents", "20M", "--index", "dense", "--latency", latency])
        assert stop.value.code == code
    shown = capsys.readouterr()
    lines = [line.split("\t") for line in shown.out.splitlines()]
    assert lines[1] == ["documents", "20,000,000", "given"]
    assert {line[2] for line in lines[2:]} == {"predicted"}
    assert "check of query ms at" in shown.err
    assert "expected a time, such as 50ms" in shown.err
