"""What a transfer did, as JSON and as a page: overlap, examples, norms, activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from irkit.files import write_text
from irkit.representation import Sparse
from irkit.tokenizer import Tokenizer
from irkit.vocabulary.alignment import Alignment, Spelling
from irkit.vocabulary.initialization import subtoken_mixture

__all__ = ["describe", "histogram", "write_report"]

_EXAMPLES, _NEIGHBORS, _BINS = 12, 5, 24
_WIDTH, _HEIGHT = 320, 90  # of a histogram
_STYLE = """\
body { font: 15px/1.5 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
:root { color-scheme: light dark; }
table { border-collapse: collapse; margin: 1em 0; } th, td { text-align: left; padding: .2em 1em .2em 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } small { color: #808080; }
figure { display: inline-block; margin: 0 2em 1em 0; }"""


def describe(
    alignment: Alignment,
    mixture: Sparse,
    tokenizers: tuple[Tokenizer, Tokenizer],
    embeddings: tuple[Tensor, Tensor],
) -> dict[str, Any]:
    """The facts of a transfer.

    Args:
        alignment: Of source and target.
        mixture: A row a new token, over the ids of the source.
        tokenizers: Of source and target.
        embeddings: ``(V, width)`` before and ``(V', width)`` after.

    Returns:
        What JSON can hold: ``vocabulary`` (sizes, overlap, tokens by rule), ``neighbors`` (how many tokens
        new ones are made of), ``examples``, ``norms`` (histograms) and ``new_tokens`` (ids).
    """
    new = alignment.is_new
    before, after = (each.float().norm(dim=1).cpu() for each in embeddings)
    lengths = mixture.terms.lengths
    return {
        "vocabulary": {
            "source": alignment.source_size,
            "target": len(alignment.tokens),
            "shared": int((~new).sum()),
            "new": int(new.sum()),
            "overlap": alignment.overlap,
            "rules": alignment.counts(),
        },
        "neighbors": {
            "mean": float(lengths.double().mean()) if len(lengths) else 0.0,
            "most": mixture.terms.max_length,
            "none": int((lengths == 0).sum()),
        },
        "examples": _examples(alignment, mixture, tokenizers),
        "norms": {
            "source": histogram(before),
            "target, shared": histogram(after[~new]),
            "target, new": histogram(after[new]),
        },
        "new_tokens": new.nonzero()[:, 0].tolist(),
    }


def histogram(values: Tensor, bins: int = _BINS) -> dict[str, Any]:
    """Mean, deviation, and how many of ``values (n,)`` lie between each two ``edges``; JSON can hold it."""
    if not len(values):
        return {"mean": 0.0, "deviation": 0.0, "edges": [], "counts": []}
    values = values.detach().double().cpu()
    low, high = float(values.min()), float(values.max())
    counts, edges = torch.histogram(values, bins, range=(low, high if high > low else low + 1.0))
    return {
        "mean": float(values.mean()),
        "deviation": float(values.std(correction=0)),
        "edges": [round(float(edge), 6) for edge in edges],
        "counts": [int(count) for count in counts],
    }


def write_report(facts: Mapping[str, Any], path: str | Path) -> None:
    """Write the facts of a transfer as a page of HTML that needs no other file.

    Args:
        facts: Of `irkit.vocabulary.Transfer`, or read from its JSON file. What is under ``calibration`` with
            the keys ``before`` and ``after``, histograms with a ``rate``, is shown too.
        path: Of the page.

    Raises:
        StorageError: It cannot be written.
    """
    write_text(path, "\n".join(_page(facts)) + "\n")


def _examples(
    alignment: Alignment, mixture: Sparse, tokenizers: tuple[Tokenizer, Tokenizer]
) -> list[dict[str, Any]]:
    """Whole words among the new tokens, evenly spread over the vocabulary, as in table 4 of the paper."""
    source, target = tokenizers
    spelling = Spelling(target.backend)
    new = alignment.is_new.nonzero()[:, 0].tolist()
    words = []
    for row, number in enumerate(new):
        token = alignment.tokens[number]
        if token is not None and not alignment.special[number]:
            form = spelling.form(token)
            if form.starts and len(form.text) > 4 and form.text.decode(errors="replace").isalpha():
                words.append((row, number, token))
    words = words[:: -(-len(words) // _EXAMPLES) or 1]
    names = source.tokens(alignment.source_size)
    pieces = subtoken_mixture(alignment, source, target, [number for _, number, _ in words])
    examples = []
    for place, (row, number, token) in enumerate(words):
        part = mixture[row : row + 1]
        best = part.weights.argsort(descending=True, stable=True)[:_NEIGHBORS]
        examples.append(
            {
                "token": token,
                "id": number,
                "subtokens": [names[piece] for piece in pieces.terms[place].tolist()],
                "neighbors": [
                    [names[int(part.terms.values[i])], round(float(part.weights[i]), 4)] for i in best
                ],
            }
        )
    return examples


def _page(facts: Mapping[str, Any]) -> Iterator[str]:
    vocabulary, bias = facts["vocabulary"], facts["bias"]
    title = f"{facts['source']} on the vocabulary of {facts['target']}"
    yield f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    yield f"<style>\n{_STYLE}\n</style>\n<h1>{escape(title)}</h1>"
    yield (
        f"<p>{vocabulary['shared']:,} of {vocabulary['target']:,} tokens ({vocabulary['overlap']:.1%}) are "
        f"shared with the {vocabulary['source']:,} of the source, {vocabulary['new']:,} are new.</p>"
    )
    rules = {"new": "without a counterpart", "role": "special, by role", "special": "added, as written"}
    yield from _table(
        ["tokens", ""], [[rules.get(rule, rule), count] for rule, count in vocabulary["rules"].items()]
    )
    settings = ", ".join(f"{key}: {value}" for key, value in facts["config"].items())
    yield f"<p><small>{escape(settings)}; {facts['seconds']} s</small></p><h2>New tokens</h2>"
    neighbors = facts["neighbors"]
    yield (
        f"<p>A new token is made of {neighbors['mean']:.1f} tokens of the source on average, of "
        f"{neighbors['most']:,} at most; {neighbors['none']:,} of none: they are the mean, or random.</p>"
    )
    rows = [
        [
            each["token"],
            " ".join(each["subtokens"]),
            ", ".join(f"{name} {weight:.3f}" for name, weight in each["neighbors"]),
        ]
        for each in facts["examples"]
    ]
    yield from _table(["token", "pieces in the source", "made of (heaviest)"], rows)
    yield "<h2>Norms of embeddings</h2>"
    yield from _figures(facts["norms"])
    yield "<h2>Output bias</h2>"
    spread = [[name, bias[name]["mean"], bias[name]["deviation"]] for name in ("before", "after")]
    yield from _table(["", "mean", "deviation"], spread)
    if calibration := facts.get("calibration"):
        yield "<h2>Activations</h2>"
        yield from _figures({name: calibration[name] for name in ("before", "after") if name in calibration})
    yield "</html>"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in header) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(map(_cell, row)) + "</tr>"
    yield "</table>"


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f"<td>{value:.4f}</td>"
    return f"<td>{escape(str(value))}</td>"


def _figures(histograms: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, facts in histograms.items():
        said = [f"mean {facts['mean']:.3f} ± {facts['deviation']:.3f}"] if "deviation" in facts else []
        said += [f"{facts['rate']:.1%} above zero"] if "rate" in facts else []
        yield f"<figure>{_bars(facts)}<figcaption>{escape(name)}<br><small>{', '.join(said)}</small>"
        yield "</figcaption></figure>"


def _bars(facts: Mapping[str, Any]) -> str:
    """A histogram as SVG."""
    counts, edges = facts["counts"], facts["edges"]
    if not counts:
        return ""
    step, most = _WIDTH / len(counts), max(*counts, 1)
    bars = "".join(
        f'<rect x="{i * step:.1f}" width="{step - 1:.1f}" y="{_HEIGHT * (1 - count / most):.1f}" '
        f'height="{_HEIGHT * count / most:.1f}"/>'
        for i, count in enumerate(counts)
    )
    y = _HEIGHT + 14
    return (
        f'<svg viewBox="0 0 {_WIDTH} {y + 4}" width="{_WIDTH}" font-size="11" fill="#0072b2">{bars}'
        f'<g fill="#808080"><text y="{y}">{edges[0]:.3g}</text>'
        f'<text x="{_WIDTH}" y="{y}" text-anchor="end">{edges[-1]:.3g}</text></g></svg>'
    )
