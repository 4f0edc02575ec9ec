"""Table 4 of "Bridging Vocabulary Gaps": the pieces of new tokens, and the tokens that they are mixtures of.

Source, target and words: answerdotai/ModernBERT-base google-bert/bert-base-uncased
collaborations nationalists clears centimetres.
"""

from __future__ import annotations

import sys

from irkit import Model
from irkit.vocabulary import transfer_vocabulary
from irkit.vocabulary.initialization import subtoken_mixture


def main(source: str, target: str, *words: str) -> None:
    """Print a row per word: the word, its pieces in the source, and its neighbours with their weights."""
    model = Model.sparse(source, device="cpu")
    moved = transfer_vocabulary(model, target, {"initialization": "semantic"})
    names = model.tokenizer.tokens(moved.alignment.source_size)
    new = moved.alignment.is_new.nonzero()[:, 0].tolist()
    rows = {moved.alignment.tokens[number]: row for row, number in enumerate(new)}
    if unknown := [word for word in words if word not in rows]:
        raise SystemExit(
            f"{unknown[0]!r} is no new token of {target}; expected some of {', '.join([*rows][-8:])}"
        )
    numbers = [new[rows[word]] for word in words]
    pieces = subtoken_mixture(moved.alignment, model.tokenizer, moved.model.tokenizer, numbers)
    for word, ids in zip(words, pieces.terms, strict=True):
        part = moved.mixture[rows[word] : rows[word] + 1]
        best = part.weights.argsort(descending=True, stable=True)[:5].tolist()
        neighbours = [f"{names[int(part.terms.values[i])]} {float(part.weights[i]):.3f}" for i in best]
        print(f"{word}: {' '.join(names[piece] for piece in ids.tolist())}: {', '.join(neighbours)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
