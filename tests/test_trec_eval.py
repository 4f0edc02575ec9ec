from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irkit.data import read_qrels
from irkit.errors import BadValueError
from irkit.evaluation.measures import Evaluation, evaluate, mean_of
from irkit.evaluation.run import Run
from irkit.evaluation.trec import relevance_strings

pytestmark = pytest.mark.filterwarnings("ignore:evaluate. no judged document:UserWarning")

# The golden files are trec_eval 10's own test outputs; every line of every file is reproduced.


def golden(path: Path) -> list[tuple[str, str, str]]:
    """Measure, query (or "all") and value of each line."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [(name.strip(), query, value) for name, query, value in rows]


def numbers(lines: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [line for line in lines if not line[0].startswith(("runid", "relstring"))]


def check_numbers(lines: list[tuple[str, str, str]], evaluation: Evaluation, suffix: str = "") -> None:
    for name, query, value in lines:
        measure = name + suffix
        got = evaluation.mean[measure] if query == "all" else evaluation.per_query[measure][query]
        assert f"{got:.{len(value.partition('.')[2])}f}" == value, (name, query)


def check_texts(lines: list[tuple[str, str, str]], run_file: Path, run: Run, qrels: Path) -> None:
    """`runid`, the tag in the run's last column, and `relstring` with its quotation marks."""
    for name, query, value in lines:
        if name == "runid":
            assert value == run_file.read_text().split(maxsplit=6)[5]
        elif name.startswith("relstring"):
            depth = int(name.removeprefix("relstring").removeprefix("_") or 10)
            assert f"'{relevance_strings(run, read_qrels(qrels), depth)[query]}'" == value


@pytest.mark.data
@pytest.mark.parametrize(
    ("expected", "qrels_file", "run_file", "depth", "level"),
    [
        ("out.test", "qrels.test", "results.test", None, 1),
        ("out.test.a", "qrels.test", "results.test", None, 1),
        ("out.test.aq", "qrels.test", "results.test", None, 1),
        ("out.test.aqc", "qrels.test", "results.trunc", None, 1),
        ("out.test.aqcM", "qrels.test", "results.trunc", 100, 1),
        ("out.test.aql", "qrels.rel_level", "results.test", None, 2),
        ("out.test.meas_params", "qrels.test", "results.test", None, 1),
    ],
)
def test_golden_files(data_dir, expected, qrels_file, run_file, depth, level):
    folder = data_dir / "golden" / "trec_eval"
    lines, suffix = golden(folder / expected), f"(rel={level})" if level > 1 else ""
    run = Run.read(folder / run_file)
    run = run.cut(depth) if depth else run
    names = {name + suffix for name, _, _ in numbers(lines)}
    check_numbers(numbers(lines), evaluate(run, folder / qrels_file, names), suffix)
    check_texts(lines, folder / run_file, run, folder / qrels_file)


SAME = {
    "AP": "map",
    "AP(rel=2)@2": "map_cut_2(rel=2)",
    "Bpref": "bpref",
    "NumQ": "num_q",
    "NumRel": "num_rel",
    "NumRet": "num_ret",
    "NumRet(rel=1)": "num_rel_ret",
    "P@2": "P_2",
    "R@2": "recall_2",
    "RR": "recip_rank",
    "SetAP": "set_map",
    "SetF": "set_F",
    "SetP": "set_P",
    "SetP(relative=True)": "set_relative_P",
    "SetR": "set_recall",
    "Success@1": "success_1",
    "nDCG": "ndcg",
    "nDCG@2": "ndcg_cut_2",
    "nDCG(gains={1:3,2:9})": "ndcg_1=3,2=9",
}
DOCS = ["a", "b", "c", "d"]
JUDGED = st.dictionaries(st.sampled_from(DOCS), st.integers(-1, 3), min_size=1)
RANKED = st.dictionaries(st.sampled_from([*DOCS, "e", "f"]), st.sampled_from([0.0, 0.5, 1.0, 2.0]))


@given(JUDGED, RANKED)
def test_both_names_of_a_measure_mean_the_same(judged, ranked):
    run, qrels = {"q": ranked, "r": {"a": 1.0}}, {"q": judged, "r": {"a": 2}, "s": {"b": 1, "c": 3}}
    ours, trec = evaluate(run, qrels, SAME), evaluate(run, qrels, SAME.values())
    for one, other in SAME.items():
        assert trec.per_query[other] == pytest.approx(ours.per_query[one], abs=1e-12), one
        assert trec.mean[other] == pytest.approx(ours.mean[one], abs=1e-12), one


LIBRARY = "num_nonrel_judged_ret gm_map gm_bpref infAP Rprec_mult_0.20 ndcg_rel Rndcg G binG relative_P_3 "
OWN = (
    "iprec_at_recall_0.00 iprec_at_recall_1 11pt_avg 11pt_avg_.2,.5 utility utility_2,-1,.5,0 unj_3 rbp "
    "rbp_p=.5 rbp_resid rbp_resid_p=0.8"
)


@given(JUDGED, RANKED)
def test_every_measure_is_finite(judged, ranked):
    result = evaluate({"q": ranked}, {"q": judged, "other": {"a": 0}}, LIBRARY + OWN)
    assert len(result.mean) == 21
    assert all(map(math.isfinite, result.mean.values()))
    assert all(math.isfinite(value) for row in result.per_query.values() for value in row.values())


@pytest.mark.parametrize("measures", ["bpref map", "gm_bpref gm_map", "map bpref infAP", "gm_bpref infAP"])
def test_rankings_that_are_empty_do_not_crash_trec_eval(measures):
    for qrels in ({"q": {"a": 0}}, {"q": {"a": 1}}, {"q": {"a": 1, "b": 0}, "r": {"a": 1}}):
        for _ in range(20):
            result = evaluate({"q": {}}, qrels, measures)
        assert all(
            value in (0.0, math.log(1e-5)) for row in result.per_query.values() for value in row.values()
        )


QRELS = {"q": {"a": 3, "b": 0, "c": 1}}


def test_two_names_of_one_measure_have_its_value():
    names = ["Rprec_mult_0.2", "Rprec_mult_0.20"]
    result = evaluate({"q": {"a": 4.0, "x": 3.0}}, QRELS, names)
    assert result.mean[names[0]] == result.mean[names[1]] == 1.0
    assert result.per_query[names[0]] == result.per_query[names[1]] == {"q": 1.0}


def test_measures_by_hand():
    result = evaluate({"q": {"a": 4.0, "x": 3.0, "c": 2.0}}, QRELS, "rbp_p=0.5 rbp_resid_p=0.5 unj_2 utility")
    assert result.mean == pytest.approx(
        {
            "rbp_p=0.5": 0.5 * (3 / 3 + 1 / 3 * 0.25),
            "rbp_resid_p=0.5": 0.5 * 0.5 + 0.5**3,
            "unj_2": 0.5,
            "utility": 1,
        }
    )
    # two of two relevant documents are needed from a recall of 0.75 on: 1.5 is rounded up, 1.48 down
    result = evaluate(
        {"q": {"b": 4.0, "a": 3.0, "c": 2.0}}, QRELS, "iprec_at_recall_0.74 iprec_at_recall_0.75"
    )
    assert result.mean == pytest.approx({"iprec_at_recall_0.74": 2 / 3, "iprec_at_recall_0.75": 2 / 3})
    result = evaluate(
        {"q": {"a": 4.0, "b": 3.0, "c": 2.0}}, QRELS, "iprec_at_recall_0.74 iprec_at_recall_0.75"
    )
    assert result.mean == pytest.approx({"iprec_at_recall_0.74": 1, "iprec_at_recall_0.75": 2 / 3})


def test_geometric_means_are_of_the_values_and_zero_is_a_hundred_thousandth():
    run, qrels = {"1": {"a": 1.0}, "2": {"x": 2.0, "a": 1.0}}, {"1": {"a": 1}, "2": {"a": 1}, "3": {"a": 1}}
    result = evaluate(run, qrels, "gm_map")
    assert result.per_query["gm_map"] == pytest.approx({"1": 0, "2": math.log(0.5), "3": math.log(1e-5)})
    assert result.mean["gm_map"] == pytest.approx((1 * 0.5 * 1e-5) ** (1 / 3))


def test_scores_that_single_precision_cannot_tell_apart_still_rank():
    run = {"q": {"a": 1.00000001, "b": 1.0}}  # the tie would put b first
    assert evaluate(run, {"q": {"a": 1}}, "P_1").mean == {"P_1": 1.0}
    assert evaluate({"q": {"a": 1.0, "b": 1.0}}, {"q": {"a": 1}}, "P_1").mean == {"P_1": 0.0}


def test_names_with_commas_in_one_string():
    names = ["P_5", "utility_2,-1,.5,0", "11pt_avg_.2,.5", "11pt_avg", "ndcg_1=3,2=9", "AP(rel=2)"]
    for separator in (" ", ",", ", "):
        assert list(evaluate({"q": {"a": 1.0}}, QRELS, separator.join(names)).mean) == names


def test_names_as_the_option_m_takes_them():
    dotted = evaluate({"q": {"a": 1.0}}, QRELS, "P.5 ndcg_cut.10 iprec_at_recall.0.1 P.5(rel=2)")
    printed = evaluate({"q": {"a": 1.0}}, QRELS, "P_5 ndcg_cut_10 iprec_at_recall_0.1 P_5(rel=2)")
    assert list(dotted.mean.values()) == list(printed.mean.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("P_0", "P_10"),
        ("P_1.5", "P_10"),
        ("recall", "recall_10"),
        ("Rprec_mult_0.00", "Rprec_mult_0.20"),
        ("Rprec_mult_0.123", "Rprec_mult_0.20"),
        ("iprec_at_recall_1.5", "iprec_at_recall_0.10"),
        ("11pt_avg_2", "11pt_avg_0.2,0.5,0.8"),
        ("utility_1,2", "utility_1,-1,0,0"),
        ("utility_1,-1,0,1", "utility_1,-1,0,0"),
        ("ndcg_5", "ndcg_1=3,2=9"),
        ("rbp_0.8", "rbp_p=0.8"),
        ("unj_x", "unj_10"),
        ("map_5", "Measures look like"),
        ("map(rel=0)", "expected at least 1|format|not"),
        ("prefs_simp", "Measures look like"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(BadValueError, match=message):
        evaluate({"q": {"a": 1.0}}, QRELS, [name])


def test_relevance_strings():
    run = Run.from_dict({"q": {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 1.0}})
    qrels = {"q": {"a": 2, "b": 10, "c": -1, "e": 0}, "missing": {"a": 1}}
    assert relevance_strings(run, qrels) == {"q": "2>.-0", "missing": ""}
    assert relevance_strings(run, qrels, 2)["q"] == "2>"
    with pytest.raises(BadValueError, match="depth"):
        relevance_strings(run, qrels, -1)


def test_a_mean_is_that_of_the_evaluation() -> None:
    run = {query: {"a": 2.0, "b": 1.0} for query in ("1", "2")}
    result = evaluate(run, {"1": {"a": 1}, "2": {"b": 1}}, "gm_map num_rel_ret nDCG@10 NumRel")
    for name, values in result.per_query.items():
        assert mean_of(name, values) == result.mean[name]
