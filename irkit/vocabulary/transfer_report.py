"""Facts of a transfer, as JSON and as an HTML page: overlap, examples, norms, activations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor

from irkit.core.representation import Sparse
from irkit.tokenizer import Tokenizer
from irkit.utils.atomic import write_text
from irkit.vocabulary.alignment import Alignment, Spelling
from irkit.vocabulary.initialization import subtoken_mixture

_EXAMPLES, _NEIGHBORS, _BINS = 12, 5, 24
_TEMPLATE = "transfer_report.html.jinja"
_RULES = {"new": "without a counterpart", "role": "special, by role", "special": "added, as written"}


def describe(
    alignment: Alignment,
    mixture: Sparse,
    tokenizers: tuple[Tokenizer, Tokenizer],
    embeddings: tuple[Tensor, Tensor],
) -> dict[str, Any]:
    """Collect the facts of a transfer.

    Args:
        alignment: Alignment of source and target.
        mixture: One row per new token, over the ids of the source.
        tokenizers: Tokenizers of source and target.
        embeddings: The word embeddings ``(V, width)`` before the transfer, and ``(V', width)`` after.

    Returns:
        Values that JSON can hold: ``vocabulary`` (sizes, overlap, tokens by rule), ``neighbors`` (of how many
        tokens the new ones are made), ``examples``, ``norms`` (histograms) and ``new_tokens`` (ids).
    """
    # which tokens are new, and the norms of the embeddings before and after
    new = alignment.is_new
    before, after = (rows.float().norm(dim=1).cpu() for rows in embeddings)
    # number of source tokens that each new one is made of
    lengths = mixture.terms.lengths
    # values that JSON can hold
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


def histogram(values: Tensor) -> dict[str, Any]:
    """Summarise ``values (n,)`` as values that JSON can hold.

    Returns:
        ``mean``, ``deviation``, ``edges`` of bins of equal width, and ``counts``: the number of values in
        each bin.
    """
    if not len(values):
        return {"mean": 0.0, "deviation": 0.0, "edges": [], "counts": []}
    values = values.detach().double().cpu()
    low, high = float(values.min()), float(values.max())
    counts, edges = torch.histogram(values, _BINS, range=(low, high if high > low else low + 1.0))
    return {
        "mean": float(values.mean()),
        "deviation": float(values.std(correction=0)),
        "edges": [round(float(edge), 6) for edge in edges],
        "counts": [int(count) for count in counts],
    }


def write_report(facts: Mapping[str, Any], path: str | Path) -> None:
    """Write the facts of a transfer as an HTML page that needs no other file.

    Args:
        facts: Facts of `irkit.vocabulary.Transfer`, or its JSON file. The page also shows ``calibration``,
            whose ``before`` and ``after`` are histograms with a ``rate``.
        path: Path of the page.

    Raises:
        StorageError: The page cannot be written.
    """
    template = (Path(__file__).parent / _TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(template).render({"calibration": None, **facts}, rules=_RULES)
    write_text(path, page + "\n")


def _examples(
    alignment: Alignment, mixture: Sparse, tokenizers: tuple[Tokenizer, Tokenizer]
) -> list[dict[str, Any]]:
    """Describe some whole words among the new tokens, as in table 4 of the paper."""
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
    subtokens = subtoken_mixture(alignment, source, target, [number for _, number, _ in words])
    examples = []
    for (row, number, token), ids in zip(words, subtokens.terms, strict=True):
        part = mixture[row : row + 1]
        heaviest = part.weights.argsort(descending=True, stable=True)[:_NEIGHBORS]
        neighbors = [[names[int(part.terms.values[i])], round(float(part.weights[i]), 4)] for i in heaviest]
        subtoken_names = [names[subtoken] for subtoken in ids.tolist()]
        examples.append({"token": token, "id": number, "subtokens": subtoken_names, "neighbors": neighbors})
    return examples
