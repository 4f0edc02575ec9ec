"""Find devices, and choose a lower precision only if it changes the vectors of a model little."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from irkit.arguments import brief
from irkit.core.representation import Several, Sparse
from irkit.encoder import Encoder
from irkit.errors import BadValueError
from irkit.formats import AnyEncoder
from irkit.heads import Head, Side
from irkit.model.pipeline import Pipeline
from irkit.tokenizer import Tokenizer

Device = str | torch.device | Sequence[str | torch.device]
"""One device or several, such as ``"cuda"`` or ``["cuda:0", "cuda:1"]``."""

DTYPES = ("float32", "bfloat16", "int8", "auto")
_SENTENCES = (
    "weather in bergen",
    "what is the boiling point of water at high altitude",
    "who wrote the origin of species",
    "Reset a forgotten router password",
    "The heart pumps blood through the body.",
    "Aspirin lowers the risk of a second heart attack in many, but not all, patients.",
    "In 1851 Léon Foucault hung a pendulum from the dome of the Panthéon to show that the earth turns.",
    "Copper conducts electricity better than any other common metal except silver, which costs far more.",
    "def mean(values): return sum(values) / len(values)",
    "The committee met on 14 March 2019, approved the budget of $3.2 million by 7 votes to 2, and adjourned.",
    "Photosynthesis turns carbon dioxide and water into sugar and oxygen; the energy comes from sunlight, "
    "which chlorophyll absorbs in the blue and the red part of the spectrum.",
    "Randomised trials compare a treatment with a placebo. Neither the patients nor their doctors know who "
    "received which, so that hope and expectation act on both groups alike and only the treatment differs.",
    "Vitamin D deficiency",
    "Glaciers move: the ice deforms under its own weight and slides over its bed, a few metres a year in "
    "cold and dry regions, several kilometres where an outlet drains an ice sheet into the sea. Meltwater "
    "that reaches the bed makes them faster, so they flow more by day and in summer.",
    "¿Dónde está la biblioteca más antigua de la ciudad?",
    "An inverted index lists for each word the documents that contain it. A query reads the lists of its "
    "words and adds up their weights, so its cost grows with the length of the lists and not with the number "
    "of documents. Compression keeps the lists short in memory; skipping avoids reading the parts that "
    "cannot change the ten best results. Most of the work of the last thirty years went into these two.",
)


def find_devices(names: Device | None) -> list[torch.device]:
    """Return the devices of one name or several; for None a GPU if there is one, else the CPU.

    Raises:
        BadValueError: A device does not exist, or the list of names is empty.
    """
    if names is None:
        return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]
    several = [names] if isinstance(names, str) or not isinstance(names, Sequence) else names
    if not several:
        raise BadValueError("device: got an empty list, expected at least one device")
    devices = []
    for name in several:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError, ValueError):
            device = torch.device("meta")  # no device to run on, like all but those below
        if device.type not in ("cpu", "cuda"):
            raise BadValueError(f"device {brief(name)}: expected cpu, cuda or cuda:0, cuda:1 and so on")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise BadValueError(f"device {device}: this machine has {torch.cuda.device_count()} GPUs")
        devices.append(device)
    return devices


def with_dtype(encoder: AnyEncoder, head: Head, tokenizer: Tokenizer, dtype: str) -> AnyEncoder:
    """Convert a float32 encoder to another precision, in place.

    The head changes only in weights that it shares with the encoder.

    Args:
        encoder: Encoder with float32 weights; changed in place.
        head: Head of the same model.
        tokenizer: Tokenizer of the same model.
        dtype: ``"float32"``; ``"bfloat16"``; ``"int8"`` (weights and inputs of linear layers, CPU only);
            ``"auto"``: bfloat16 if the device multiplies it faster than float32 and each vector of 16
            built-in sentences keeps a cosine of 0.999 to its float32 vector, otherwise float32. For a
            multi-vector model the sentences are encoded as documents and as queries, because pooling and
            expansion differ.

    Returns:
        The encoder.

    Raises:
        BadValueError: The dtype is unknown, or the encoder cannot run in it.
    """
    device = next(encoder.parameters()).device
    if dtype == "auto":
        if not prefers_bfloat16(device):
            return encoder
        half, its_head = copy.deepcopy((encoder, head))  # together: a head may share a weight of the encoder
        _halve(half)
        pairs = zip(_vectors(encoder, head, tokenizer), _vectors(half, its_head, tokenizer), strict=True)
        alike = all(
            exact.shape == rounded.shape and bool(F.cosine_similarity(exact, rounded).min() >= 0.999)
            for exact, rounded in pairs
        )
        return _halve(encoder) if alike else encoder
    if dtype == "bfloat16":
        if not prefers_bfloat16(device):
            warnings.warn(f"bfloat16 on {device}: it multiplies float32 faster; choose float32", stacklevel=3)
        return _halve(encoder)
    if dtype == "int8":
        if not isinstance(encoder, Encoder) or device.type != "cpu":
            what = f"on {device}" if device.type != "cpu" else f"of type {encoder.family}"
            raise BadValueError(f"int8: not for an encoder {what}; expected one of irkit's own on the CPU")
        encoder.quantize_()
    elif dtype != "float32":
        raise BadValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return encoder


def _halve(encoder: AnyEncoder) -> AnyEncoder:
    """Convert an encoder to bfloat16, in place.

    On the CPU the norms of irkit's own encoders stay float32: they are few numbers, and rounding them changes
    vectors as much as rounding everything else does.
    """
    norms = [module for module in encoder.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    exact = [copy.deepcopy(norm.state_dict()) for norm in norms]
    encoder.to(torch.bfloat16)
    if isinstance(encoder, Encoder) and next(encoder.parameters()).is_cpu:
        for norm, weights in zip(norms, exact, strict=True):
            norm.float().load_state_dict(weights)
    return encoder


def keep_few_shapes() -> None:
    """Limit the caches of compiled products in oneDNN and torch to 64 shapes instead of 1,024.

    The function sets the environment variables ``ONEDNN_PRIMITIVE_CACHE_CAPACITY`` and
    ``LRU_CACHE_CAPACITY``, unless they are set already. Both libraries read the variables at their first
    product. Each number of tokens takes 0.5 MB of code, and hardly any two steps have the same number, so
    that the caches would grow to 800 MB. Compiling is as fast as looking up.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def prefers_bfloat16(device: torch.device) -> bool:
    """Return True if the device multiplies bfloat16 numbers faster than float32.

    Instructions for bfloat16 do not tell: those of Intel's processors without AMX take longer than float32
    does. A CPU that has such instructions is timed, once in a process.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    features = torch.cpu.get_capabilities()
    return any(features.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16")) and _speedup() > 1


@functools.cache
def _speedup() -> float:
    """Return the time of a product in float32 over that in bfloat16 on this CPU; both take milliseconds."""
    seconds = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    factors = {
        dtype: [torch.ones(size, 768, dtype=dtype, device="cpu") for size in (512, 768)] for dtype in seconds
    }
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(5):  # in turns; the best times are those without other work beside them
            for dtype, (rows, weight) in factors.items():
                start = time.perf_counter()
                F.linear(rows, weight)
                seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def _vectors(encoder: AnyEncoder, head: Head, tokenizer: Tokenizer) -> list[torch.Tensor]:
    """Return the vectors of the sentences, a tensor for each side and head."""
    sides: tuple[Side, ...] = ("document", "query") if head.kind == "multi_vector" else ("document",)
    pipelines = [Pipeline(tokenizer, encoder, head, side, tokens_per_step=1024) for side in sides]
    parts = [pipeline.encode_tokens(pipeline.tokenize(_SENTENCES)) for pipeline in pipelines]
    if isinstance(parts[0], Several):
        parts = [
            head_part for part in parts if isinstance(part, Several) for head_part in part.parts.values()
        ]
    return [
        part.to_dense() if isinstance(part, Sparse) else torch.from_numpy(part.arrays()["values"])
        for part in parts
    ]
