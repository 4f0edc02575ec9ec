"""The package in tests/plugin adds a head, an index kind, a loss, a family and a format to irkit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
import yaml

import irkit
from irkit import Model, Retriever
from irkit.errors import ConfigError
from irkit.tokenizer import Tokenizer

PLUGIN = Path(__file__).parent / "plugin"

COMMANDS = """
from irkit.cli import main

def call(*words):
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise

call("train", "recipe.yaml", "--out", "model", "--set", "train.max_steps=2")
call("index", "model", "notes", "--index", "signs", "--set", "candidates=6", "--out", "index")
call("index", "model", "notes", "--index", "flat", "--out", "flat")
for index in ("index", "flat"):
    call("search", index, "--text", "neural search", "--k", "3")
call("export", "model", "--to", "onnx", "--out", "onnx")
call("index", "--help")
call("train", "--help")
"""
CHECKS = """
import json
import numpy as np
import torch
from irkit import Model
from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.errors import IrkitError
from irkit.index import Store, open_index

encoder = Encoder.from_pretrained("electra")
with torch.no_grad():
    np.save("hidden.npy", encoder(Ragged.from_rows([[5, 6, 7], [8]])).values)
encoder.save_pretrained("electra_again")
model = Model.from_pretrained("model", device="cpu")
head = model.head
np.save("vectors.npy", model.encode_representation(["neural search", "index"], "document").values)
np.save("ids.npy", model.pipeline("document").tokenize(["neural search", "index"]).to_padded(0)[0])
table = Model.from_pretrained("table", device="cpu")
for _ in range(2):  # the second time over the first
    table.save_pretrained("table_again", format="word-table")
again = Model.from_pretrained("table_again", device="cpu")
refused = []
for other, path, format in ((model, "other", "word-table"), (table, "notes", "word-table")):
    try:
        other.save_pretrained(path, format=format)
    except IrkitError as error:
        refused.append(str(error))
print(json.dumps({
    "table": [table.fingerprint == again.fingerprint, again.dim, refused],
    "on table": Model.with_head("dense", "table", device="cpu").dim,
    "head": [type(head).__name__, head.settings()],
    "index": type(open_index(Store.open("index"))).__name__,
    "family": encoder.family,
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which Python finds the package as if pip had installed it."""
    site = tmp_path_factory.mktemp("site")
    (site / "irkit_example").symlink_to(PLUGIN / "irkit_example")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = site / f"irkit_example-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in parts.items())])
        for group, parts in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections) + "\n")
    paths = [str(site), str(Path(irkit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}


def write_electra(path: Path) -> np.ndarray:
    """Save a small ELECTRA of random weights and return its hidden states of two texts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.ElectraConfig(vocab_size=20, embedding_size=16, initializer_range=0.3, **sizes)
    model = transformers.ElectraModel(config).eval()
    model.save_pretrained(path)
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).last_hidden_state[0] for ids in ([5, 6, 7], [8])]
    return torch.cat(rows).numpy()


def write_table(tiny_bert: Path, path: Path) -> None:
    """Write a directory of the format ``word-table``, with the tokenizer of another model."""
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    tokenizer.save(path)
    rows = torch.randn(tokenizer.vocab_size, 6, generator=torch.Generator().manual_seed(0))
    (path / "table.json").write_text('{"unit": true}')
    (path / "vectors.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows.tolist()))


def test_parts_of_another_package_are_trained_indexed_and_searched(
    installed: dict[str, str], tiny_bert: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = write_electra(tmp_path / "electra")
    write_table(tiny_bert, tmp_path / "table")
    recipe: dict[str, Any] = {
        "model": {"kind": "gated_mean", "name": str(tiny_bert), "config": {"bias": False}},
        "data": {"source": "notes", "split": "test", "documents": 1},
        "losses": [{"kind": "hinge", "margin": 0.5}, {"kind": "infonce", "weight": 0.1}],
        "train": {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1},
    }
    (tmp_path / "notes").symlink_to(notes)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    # a process of its own, because the tables of this one may have been read already
    command = [sys.executable, "-c", COMMANDS + CHECKS]
    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    values = json.loads(last)
    help_text = "\n".join(lines[6:])
    assert "Kinds of indexes of other packages:\n  signs" in help_text
    assert "hinge" in help_text
    assert values["head"] == ["GatedMeanHead", {"bias": False}]
    assert values["index"] == "SignIndex"
    hits = [(line.split("\t")[2], float(line.split("\t")[1])) for line in lines[:6]]
    for ours, exact in zip(hits[:3], hits[3:], strict=True):  # half of the documents are candidates
        assert ours == (exact[0], pytest.approx(exact[1], abs=2e-6))
    steps = [json.loads(line) for line in (tmp_path / "model" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]
    same, dim, (no_table, not_replaced) = values["table"]
    assert (same, dim, values["on table"]) == (True, 6, 6)
    assert "a word table holds the mean of one vector per token" in no_table
    assert "the directory is neither empty nor a model's" in not_replaced
    assert values["family"] == "electra"
    np.testing.assert_allclose(np.load(tmp_path / "hidden.npy"), hidden, rtol=1e-4, atol=1e-5)
    again = transformers.AutoModel.from_pretrained(tmp_path / "electra_again").state_dict()
    before = transformers.AutoModel.from_pretrained(tmp_path / "electra").state_dict()
    assert all(torch.equal(again[name], before[name]) for name in before)

    # the ONNX file needs neither irkit nor the package
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    ids = np.load(tmp_path / "ids.npy")
    [vectors] = session.run(None, {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)})
    np.testing.assert_allclose(
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.load(tmp_path / "vectors.npy"), atol=1e-5
    )

    # without the package, what it made is an error that names the missing part
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="head named 'gated_mean', which no installed package adds"):
        Model.from_pretrained("model")
    with pytest.raises(ConfigError, match=r"unknown kind 'signs'.* install the package that adds the kind"):
        Retriever.load("index")
