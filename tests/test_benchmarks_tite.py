"""The suite ``tite``: what it measures is the same everywhere, and what it says of it is right."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

SIZES = {"layers": 12, "hidden_size": 36, "heads": 3, "intermediate_size": 72, "vocab_size": 300}


def row(model: str, code: str, seconds: list[float], attention: str = "sdpa") -> dict[str, object]:
    same = {"texts": "passages", "precision": "float32", "attention": attention}
    return {**same, "model": model, "code": code, "texts/s": 100 / min(seconds), "seconds": seconds}


def test_what_is_wanted_of_pooling() -> None:
    from benchmarks.tite import bars, table

    rows = [
        row("no pooling", "irkit", [9.0, 10.0, 30.0]),
        row("TITE 2: 2-staggered", "authors", [2.0, 2.0, 2.0]),
        row("TITE 2: 2-staggered", "irkit", [2.0, 2.0, 2.0]),
        row("TITE 2: 2-staggered", "irkit", [0.1, 0.1, 0.1], "eager"),
    ]
    found = {each["passages/s of"]: (each["is"], each["met"]) for each in bars(rows, "cpu")}
    assert found == {
        "TITE 2: 2-staggered (irkit) / no pooling (irkit)": (5.0, "yes"),
        "TITE 2: 2-staggered (irkit) / TITE 2: 2-staggered (authors)": (1.0, "no"),
    }
    assert [each["passages/s float32"] for each in table(rows)] == [
        "11.1 (1.00x)",
        "50.0 (5.00x)",
        "50.0 (5.00x)",
        "1,000",
    ]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    from benchmarks.plot import draw_bars

    rows = [row("no pooling", "irkit", [4.0]), row("TITE 1: 2-late", "irkit", [1.0])]
    svg = ElementTree.fromstring(draw_bars(rows, ["passages"], "float32"))
    paths = [
        shape.get("d", "") for shape in svg.iter("{http://www.w3.org/2000/svg}path") if shape.get("clip-path")
    ]
    ends = [[float(word) for word in path.split() if word[0].isdigit()][0::2] for path in paths]
    slow, fast = (max(x) - min(x) for x in ends)
    assert fast == pytest.approx(4 * slow, abs=0.1)


@pytest.mark.slow
def test_every_encoder_is_compared_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import tite
    from benchmarks.tite_encoders import TITE

    monkeypatch.setenv("IRKIT_PEERS", str(tmp_path))  # no authors' code
    monkeypatch.setattr(tite, "TOKENS", {"cpu": 300})
    monkeypatch.setattr(tite, "ROUNDS", {"passages": 1, "queries": 1})
    monkeypatch.setattr(tite, "PRECISIONS", {"cpu": ("float32",)})
    rows = list(tite.measure("cpu", SIZES))
    names = ("BERT", "DistilBERT", "ModernBERT", "Funnel", *TITE)
    assert {each["model"] for each in rows} == set(names)
    assert all(each["difference"] < 1e-5 and each["texts/s"] > 0 for each in rows)
    assert len(tite.table(rows)) == 2 * 2 + 2 + 2 + 2 * 2 + 6  # transformers, BERT by us, ours


def test_outputs_that_differ_are_not_timed() -> None:
    from benchmarks.tite import check
    from benchmarks.tite_encoders import Contender
    from irkit import Ragged

    one, other = (
        Contender("BERT", code, "sdpa", lambda tokens: tokens.values, lambda ids, by=by: ids[:, None] + by)
        for code, by in (("transformers", 0.0), ("irkit", 1e-3))
    )
    tokens = Ragged.from_rows([[1, 2], [3]])
    assert check([one, one], tokens, "float32") == {"BERT": 0.0}
    with pytest.raises(SystemExit, match=r"irkit BERT sdpa differs from .* by 0\.001; not timed"):
        check([one, other], tokens, "float32")


@pytest.mark.slow
@pytest.mark.data
def test_lengths_are_those_of_passages_and_queries(data_dir: Path, minilm: Path) -> None:
    from benchmarks.tite import QUANTILES
    from irkit.data import read_documents, read_queries
    from irkit.tokenizer import Tokenizer

    pools = [data_dir / "msmarco-dl19-pool", data_dir / "msmarco-dl21-pool"]
    texts = {
        "passages": [document.full_text for pool in pools for document in read_documents(pool)],
        "queries": [query.text for pool in pools for query in read_queries(pool)],
    }
    tokenizer = Tokenizer.from_pretrained(minilm)
    tokenizer.max_length = 512
    for kind, stored in QUANTILES.items():
        found = tokenizer(texts[kind]).lengths.sort().values
        places = (torch.arange(64) + 0.5) / 64 * len(found)
        assert found[places.long()].tolist() == [int(number) for number in stored.split()]
