"""Parts of other packages: found by entry points, imported when looked up, refused with a clear message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from irkit.errors import ConfigError
from irkit.utils.plugins import Registry

GROUP = "irkit.test_parts"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts a distribution with entry points on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(package: str, code: str, **points: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}:{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]) + "\n")
        (tmp_path / f"{package}.py").write_text(code)

    return add


def table() -> Registry[type]:
    return Registry(GROUP, dict, {"own": dict, "lazy": "collections:OrderedDict"})


def test_names_of_other_packages_follow_our_own(install: Callable[..., None]) -> None:
    install("added_parts", "class Table(dict): ...", zebra="Table", ant="Table")
    parts = table()
    assert list(parts) == ["own", "lazy", "ant", "zebra"]
    assert len(parts) == 4
    assert [name in parts for name in ("ant", "own", "bee", 3)] == [True, True, False, False]
    assert "added_parts" not in sys.modules  # listing imports nothing
    assert parts["ant"] is parts["zebra"] is sys.modules["added_parts"].Table
    assert parts["lazy"].__name__ == "OrderedDict"
    with pytest.raises(KeyError):
        parts["bee"]


def test_own_names_need_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise AssertionError("metadata was read")

    monkeypatch.setattr("irkit.utils.plugins.entry_points", refuse)
    parts = table()
    assert parts["own"] is dict
    assert parts["lazy"].__name__ == "OrderedDict"


@pytest.mark.parametrize("name", ["own", "reserved"])
def test_a_name_in_use_is_an_error(install: Callable[..., None], name: str) -> None:
    install("thief", "class Table(dict): ...", **{name: "Table"})
    with pytest.raises(ConfigError, match=f"the package thief adds '{name}', a name that irkit has already"):
        list(Registry(GROUP, dict, {"own": dict}, reserved=["reserved"]))


def test_two_packages_with_one_name_are_an_error(install: Callable[..., None]) -> None:
    for package in ("first_parts", "second_parts"):
        install(package, "class Table(dict): ...", ant="Table")
    with pytest.raises(ConfigError, match=r"_parts adds 'ant', a name that \w+_parts has already"):
        table()["ant"]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "raise RuntimeError('no\\nluck')",
            "cannot be imported: RuntimeError: no luck; repair",
        ),
        ("", "cannot be imported: AttributeError"),
        ("Table = 3", "is 3, expected a dict"),
        ("class Table: ...", "is <class 'broken.Table'>, expected a dict"),
        ("import missing_module_of_it", "ModuleNotFoundError: No module named 'missing_module_of_it'"),
    ],
)
def test_a_broken_part_is_named(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    install("broken", code, ant="Table")
    parts = table()
    assert list(parts) == ["own", "lazy", "ant"]
    with pytest.raises(ConfigError, match="'ant' of the package broken") as caught:
        parts["ant"]
    assert problem in str(caught.value)
    assert parts["own"] is dict
