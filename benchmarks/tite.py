"""Suite ``tite``: texts per second of encoders that pool and of those that do not, as Table 4 of the paper.

Encoders are of BERT-base's size and have random weights, tokens are random. How long texts are is what the
passages and queries of TREC Deep Learning 2019 and 2021 are; as in any encoding of many texts, those of about
one length go together. Batches have as many tokens as `irkit.Model` gives an encoder at once, which is fewer
where nothing is pooled: there they hold every other text of those for encoders that pool. Outputs of the same
model are compared before anything is timed. On a CPU one thread works, and times are those of the processor.

The authors' code, https://github.com/webis-de/tite at a38bd19, is found in the folder that ``IRKIT_PEERS``
names, in which its folder ``tite`` and einops belong: ``pip install --no-deps --target $IRKIT_PEERS einops``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Row, interleave, write_results
from benchmarks.tite_encoders import AS_THEY_COME, Contender, Sizes, contenders

if TYPE_CHECKING:
    from torch import Tensor

    from irkit import Ragged

__all__ = ["bars", "batches", "check", "main", "measure", "table"]

# Tokens of 64 texts of which each stands for as many: of 25,134 passages and of 96 queries.
QUANTILES = {
    "passages": (
        "33 40 43 45 47 49 50 52 53 53 54 55 56 57 58 58 59 60 60 61 62 62 63 64 64 65 65 66 67 67 68 69 "
        "69 70 71 71 72 73 74 75 76 77 78 79 80 82 83 85 87 89 92 95 98 101 105 108 112 117 122 127 134 "
        "143 154 179"
    ),
    "queries": (
        "6 6 6 6 6 7 7 7 7 7 7 8 8 8 8 8 8 8 8 8 8 9 9 9 9 9 9 9 9 9 9 10 10 10 10 10 11 11 11 12 12 12 12 "
        "12 12 12 13 13 13 14 14 14 14 14 14 15 15 15 16 16 16 18 18 21"
    ),
}
TEXTS = {"cpu": 2048, "cuda": 16_384}  # that are sorted by length together
TOKENS = {"cpu": 2048, "cuda": 131_072}  # of a batch of an encoder that pools
SMALL = {"cpu": 2, "cuda": 1}  # every which text is in a batch of one that does not
MIXED = {"cpu": 16, "cuda": 512}  # texts of a batch in which they are of any length
BATCHES = {"cpu": {"passages": 2, "queries": 1}, "cuda": {"passages": 2, "queries": 1}}
ROUNDS = {"passages": 3, "queries": 2}
PRECISIONS = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}

NO_POOLING, LATE, STAGGERED = "no pooling", "TITE 1: 2-late", "TITE 2: 2-staggered"
_WANTED: dict[str, list[tuple[tuple[str, str], tuple[str, str], str, float]]] = {
    # passages a second of one over another, with which attention; "" is each that both have
    device: [
        ((STAGGERED, "irkit"), (NO_POOLING, "irkit"), attention, staggered),
        ((LATE, "irkit"), (NO_POOLING, "irkit"), attention, late),
        ((STAGGERED, "irkit"), (STAGGERED, AS_THEY_COME), "", 1.3),
        ((LATE, "irkit"), (LATE, AS_THEY_COME), "", 1.3),
        ((STAGGERED, "irkit"), (STAGGERED, "authors"), "", 1.3),
        ((LATE, "irkit"), (LATE, "authors"), "", 1.3),
        (("BERT", "irkit"), ("BERT", "transformers"), "", 1.0),
    ]
    for device, attention, staggered, late in (("cpu", "sdpa", 4.5, 2.7), ("cuda", "flash", 3.3, 2.4))
}


def main() -> None:
    """Measure on the CPU."""
    import torch

    from benchmarks.plot import draw_bars

    torch.set_num_threads(1)
    rows = list(measure("cpu"))
    write_results("tite_all", rows)
    write_results("tite_speed", table(rows))
    write_results("tite", bars(rows, "cpu"))
    (Path(__file__).parents[1] / "docs" / "tite.svg").write_text(draw_bars(rows, list(QUANTILES), "bfloat16"))


def measure(device: str, sizes: Sizes | None = None) -> Iterator[Row]:
    """Yield a row per contender, precision and kind of texts; ``seconds`` are per text, one for each round.

    Args:
        device: ``cpu`` or ``cuda``.
        sizes: Sizes of the encoders; by default those of BERT-base.
    """
    import torch

    from irkit import Ragged

    clock = time.process_time if device == "cpu" else time.perf_counter
    for precision in PRECISIONS[device]:
        torch.manual_seed(0)
        found = list(contenders(device, getattr(torch, precision), sizes or {}))
        for kind in QUANTILES:
            given = {name: batches(kind, device, name) for name in ("small", "large", "mixed")}
            with torch.inference_mode():
                different = check(
                    found, Ragged.concat([batch[[0, -1]] for batch in given["small"]]), precision
                )
                runs = {one.name: _run(one, given[one.batches], device) for one in found if one.timed}
                seconds = interleave(runs, ROUNDS[kind], clock)
            for one in found:
                if one.timed:
                    what = {"texts": kind, "precision": precision, "model": one.model, "code": one.code}
                    row = {**what, "attention": one.attention, "difference": different[one.model]}
                    row["seconds"] = [each / sum(map(len, given[one.batches])) for each in seconds[one.name]]
                    row["texts/s"] = 1 / min(row["seconds"])
                    print(row, file=sys.stderr, flush=True)
                    yield row


def batches(kind: str, device: str, name: str) -> list[Ragged]:
    """Return some of the batches of many texts of a kind: sorted by length, longest first, or ``mixed``."""
    import torch

    from irkit import Ragged
    from irkit.model.pipeline import plan_steps

    known = torch.tensor([int(number) for number in QUANTILES[kind].split()])
    if name == "mixed":
        known = known.repeat_interleave(MIXED[device] // 16)
        chosen = list(known[torch.randperm(len(known))].split(MIXED[device]))
    else:
        known = known.repeat_interleave(TEXTS[device] // len(known))
        steps, count = plan_steps(known, TOKENS[device]), BATCHES[device][kind]
        chosen = [known[steps[(2 * place + 1) * len(steps) // (2 * count)]] for place in range(count)]
        chosen = [rows[:: SMALL[device] if name == "small" else 1] for rows in chosen]
    return [Ragged(torch.randint(5, 200, (int(rows.sum()),)), rows).to(device) for rows in chosen]


def check(found: Sequence[Contender], tokens: Ragged, precision: str) -> dict[str, float]:
    """Return the largest difference between contenders by model; too large a difference ends the run."""
    import torch

    first: dict[str, tuple[str, Tensor]] = {}
    differences: dict[str, float] = {}
    for one in found:
        got = one.encode(one.prepare(tokens)).float()
        other, expected = first.setdefault(one.model, (one.name, got))
        difference = float((got - expected).abs().max())
        cosine = float(torch.nn.functional.cosine_similarity(got, expected, dim=-1).min())
        if cosine < 0.99 or (precision == "float32" and difference > 1e-4):
            raise SystemExit(f"tite: {one.name} differs from {other} by {difference:.2g}; not timed")
        differences[one.model] = max(difference, differences.get(one.model, 0.0))
    return differences


def table(rows: Sequence[Row]) -> list[Row]:
    """Return a row per encoder: texts per second, and their ratio to irkit's encoder without pooling."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        who = row["model"], row["code"], row["attention"]
        cells = found.setdefault(who, dict(zip(("encoder", "code", "attention"), who, strict=True)))
        base = _find(rows, NO_POOLING, "irkit", row)
        times = "" if base is None else f" ({_ratio(row, base):.2f}x)"
        speed = f"{row['texts/s']:,.0f}" if row["texts/s"] >= 100 else f"{row['texts/s']:.1f}"
        cells[f"{row['texts']}/s {row['precision']}"] = speed + times
    return list(found.values())


def bars(rows: Sequence[Row], device: str) -> list[Row]:
    """Return a row per bar; bars without a measurement are left out."""
    result = []
    for (model, code), other, attention, wanted in _WANTED[device]:
        for row in rows:
            is_it = (row["texts"], row["model"], row["code"]) == ("passages", model, code)
            base = _find(rows, *other, row) if is_it and attention in ("", row["attention"]) else None
            if base is not None:
                value = _ratio(row, base)
                result.append(
                    {
                        "passages/s of": f"{model} ({code}) / {other[0]} ({other[1]})",
                        "attention": row["attention"],
                        "precision": row["precision"],
                        "is": value,
                        "wanted": f">= {wanted:g}",
                        "met": "yes" if value >= wanted else "no",
                    }
                )
    return result


def _find(rows: Sequence[Row], model: str, code: str, like: Row) -> Row | None:
    """Return the row of ``model`` by ``code`` that is otherwise ``like`` another."""
    same = ("texts", "precision", "attention")
    chosen = (row for row in rows if (row["model"], row["code"]) == (model, code))
    return next((row for row in chosen if all(row[key] == like[key] for key in same)), None)


def _ratio(row: Row, base: Row) -> float:
    """Return how many times as fast one row is as another, the median over the rounds."""
    return statistics.median(b / a for a, b in zip(row["seconds"], base["seconds"], strict=True))


def _run(one: Contender, given: Sequence[Ragged], device: str) -> Callable[[], None]:
    import torch

    inputs = [one.prepare(tokens) for tokens in given]

    def run() -> None:
        for each in inputs:
            one.encode(each)
        if device == "cuda":
            torch.cuda.synchronize()

    return run
