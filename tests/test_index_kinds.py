"""The table of index kinds, kinds of other packages, and indexes of earlier versions."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from irkit.cli.index import index as index_command
from irkit.core.representation import representation_from_arrays
from irkit.errors import ConfigError
from irkit.index import Documents, Store, index_config, open_index
from irkit.index.index_kinds import OWN_KINDS, index_names, suitable_names

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "indexes.zip"
SHOWN = ["auto", *(name for kind, row in OWN_KINDS.items() for name in (row.short or [kind]))]


def test_a_row_of_the_table_fits_its_class() -> None:
    for name, kind in OWN_KINDS.items():
        assert kind.config.model_fields["kind"].default == name
        assert all(name in suitable_names(holds) for holds in kind.holds)
        module, _, attribute = kind.index.partition(":")
        assert hasattr(importlib.import_module(module), attribute)
    assert all(index_config(name).kind for name in index_names())


def test_help_and_docs_name_every_kind() -> None:
    choice = get_type_hints(index_command, include_extras=True)["choice"]
    text = choice.__metadata__[0].help
    assert sorted(re.findall(r"\w+", text.split(", a factory string")[0])) == sorted(SHOWN)
    table = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "indexes.md").read_text().split("## Dense")[0], re.M
    )
    assert sorted(table) == sorted(set(SHOWN) - {"auto"})


# ---- kinds of other packages ----

NEAREST = '''
from typing import Literal
from irkit.index import IndexConfig, IndexKind, StoredRows

class NearestConfig(IndexConfig):
    kind: Literal["nearest"] = "nearest"
    width: int = 8

class Nearest(StoredRows):
    """Searches as many rows exactly as its width says."""

    def _search(self, queries, k, keep):
        import numpy as np
        first = np.arange(len(self)) < self.config.width
        return self._scan_all(queries, k, first if keep is None else first & keep)

KIND = IndexKind(NearestConfig, "nearest_index:Nearest", ("dense",), short={"next_to": {"width": 2}})
'''
USE = """
import json
from irkit.cli import main
from irkit.errors import IrkitError
from irkit.index import Store, create_index, index_config, index_names, open_index
print(json.dumps(index_names()[-2:]))
lines = [json.dumps({"_id": f"d{i}", "vector": [1, i / 9]}) + "\\n" for i in range(6)]
open("v.jsonl", "w").writelines(lines)
try:
    main(["index", "vectors", "v.jsonl", "--index", "nearest", "--set", "width=4", "--out", "made"])
except SystemExit as end:
    assert not end.code, end.code
index = open_index(Store.open("made"))
print(type(index).__name__, index.config.width, index.stats()["documents"])
from irkit import Retriever
print([hit.id for hit in Retriever.load("made").search([0.0, 1.0], 2)])
print(index_config("next_to").width)
for wrong in ("nearst", {"kind": "nearest", "widht": 3}):
    try:
        index_config(wrong)
    except IrkitError as error:
        print(error)
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str, str], subprocess.CompletedProcess[str]]:
    """``python(package, code)``: run code beside an installed package that has the kind "nearest"."""

    def run(package: str, code: str) -> subprocess.CompletedProcess[str]:
        info = tmp_path / "site" / "nearest_index-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nearest_index\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[irkit.indexes]\nnearest = nearest_index:KIND\n")
        (tmp_path / "site" / "nearest_index.py").write_text(package)
        program = f"import sys; sys.path.append({str(tmp_path / 'site')!r})\n{code}"
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_a_kind_of_another_package_is_built_and_searched_by_the_command_line(python: Any) -> None:
    done = python(NEAREST, USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        '["next_to", "nearest"]',
        "Nearest 4 6",
        "['d3', 'd2']",
        "2",
        "index: unknown kind 'nearst'; did you mean 'nearest'?",
        "index: unknown key 'widht'; did you mean 'width'?",
    ]


def test_a_kind_that_cannot_be_imported_harms_no_other(python: Any) -> None:
    code = "from irkit.index import index_config; print(index_config('hnsw').kind); index_config('nearest')"
    done = python("import not_there", code)
    assert done.stdout == "faiss\n"
    assert "irkit.indexes: 'nearest' of the package nearest_index" in done.stderr
    assert "cannot be imported: ModuleNotFoundError" in done.stderr


def test_a_stored_index_of_a_missing_package_is_an_error_that_names_the_kind(tmp_path: Path) -> None:
    with Store.build(tmp_path / "index") as store:
        with store.update():
            store.meta["index"] = {"config": {"kind": "gone"}, "representation": None, "dim": 0, "rows": 0}
        with pytest.raises(ConfigError, match="unknown kind 'gone'"):
            open_index(store)


# ---- indexes of earlier versions ----

with zipfile.ZipFile(GOLDEN) as archive:
    ANSWERS = json.loads(archive.read("answers.json"))


@pytest.mark.parametrize("name", ANSWERS)
def test_an_index_of_an_earlier_version_answers_as_before(
    name: str, tmp_path: Path, small_limits: Callable[..., None]
) -> None:
    """Built by version 0.1.0 at 1a769e3: 48 rows, of which every 7th was removed, and 6 added later."""
    small_limits(
        faiss_scan=8,
        faiss_scan_per_hit=1,
        faiss_points=1,
        inverted_unlisted=8,
        plaid_uncompressed=20,
        plaid_scan=4,
    )
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path, [file for file in archive.namelist() if file.startswith(f"{name}/")])
    store, answers = Store.open(tmp_path / name), ANSWERS[name]
    if name == "muvera":  # searched by FAISS then
        with pytest.raises(ConfigError, match=r"unknown key 'factory'.*build it again with `irkit index`"):
            open_index(store)
        return
    index = open_index(store)
    assert index.stats() == answers["stats"]
    arrays = {
        key: np.array(values, np.int64 if key == "lengths" else np.int32 if key == "terms" else np.float32)
        for key, values in answers["queries"].items()
    }
    queries = representation_from_arrays(str(index.representation), 8, arrays)
    hits = index.search(queries, 5)
    np.testing.assert_allclose(hits.scores, answers["scores"], rtol=1e-5)
    assert hits.rows.tolist() == answers["rows"]
    for key, values in index.representations(np.arange(1, 2)).arrays().items():
        np.testing.assert_allclose(values, answers["first"][key], rtol=1e-5)
    documents = Documents(store)
    assert documents.find(["d0", "d1", "e5"]).tolist() == [-1, 1, 53]
    assert documents["d1"].metadata == {"n": 1}
    index.finish()  # extends what was built
    assert index.search(queries, 5).scores[:, 0] == pytest.approx(hits.scores[:, 0], rel=0.2)
