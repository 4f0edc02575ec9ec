"""Makes two models of one: ``python hide_words.py MODEL COLLECTION OUT [TOKENS]``.

OUT/whole is the model with the 8,192 tokens that the collection has most often, among them all characters.
OUT/part lacks two fifths of these words, drawn at random. So a transfer from part to whole is that of a model
to a better vocabulary whose embeddings are known, which semantic initialisation needs.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from irkit import Model
from irkit.data import read_documents
from irkit.vocabulary import transfer_vocabulary

SHARE, SEED = 0.4, 0


def with_tokens(model: Model, tokens: Iterable[str]) -> Model:
    """Give a model a part of its own tokens, in this order."""
    state = json.loads(model.tokenizer.backend.to_str())
    ids = {token: number for number, token in enumerate(tokens)}
    state["model"]["vocab"] = ids
    for token in state["added_tokens"]:
        token["id"] = ids[token["content"]]
    for special in state["post_processor"]["special_tokens"].values():
        special["ids"] = [ids[token] for token in special["tokens"]]
    with TemporaryDirectory() as folder:
        model.tokenizer.save(folder)
        (Path(folder) / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
        return transfer_vocabulary(model, folder, {"initialization": "mean", "bias": "copied"}).model


def main(name: str, collection: str, out: str, size: str = "8192") -> None:
    """Write both models."""
    model = Model.sparse(name, device="cpu")
    texts = [document.full_text for document in read_documents(collection)]
    counts = Counter(model.tokenizer(texts).values.tolist())
    tokens = model.tokenizer.tokens(model.dim)
    special = set(model.tokenizer.special_tokens())
    fixed = [n for n, token in enumerate(tokens) if n in special or len(token.removeprefix("##")) == 1]
    often = [number for number, _ in counts.most_common() if number not in {*fixed}]
    whole = with_tokens(model, (tokens[n] for n in sorted([*fixed, *often[: int(size) - len(fixed)]])))
    words = [token for token in whole.tokenizer.tokens(whole.dim) if len(token.removeprefix("##")) > 1]
    words = [word for word in words if not word.startswith("[")]
    hidden = set(random.Random(SEED).sample(words, int(SHARE * len(words))))
    part = with_tokens(whole, (token for token in whole.tokenizer.tokens(whole.dim) if token not in hidden))
    whole.save_pretrained(Path(out) / "whole")
    part.save_pretrained(Path(out) / "part")


main(*sys.argv[1:])
