"""Suite ``gpu``: every test marked ``gpu``, every kernel bench and the encoder on CUDA, in under 8 minutes.

Needs no data and no weights: models are random, lengths follow those of MS MARCO passages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, interleave, matmul_peak, ratio, write_results
from benchmarks.kernels import run_kernels

PASSAGES, TOKENS_PER_STEP, BATCH = 4096, 32_768, 32
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SHAPES = {
    "MiniLM-L6": (384, 6, 12, 1536),
    "BERT-base": (768, 12, 12, 3072),
    "ModernBERT-base": (768, 22, 12, 1152),
}


def main() -> None:
    """Run all of it, or say why not."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("gpu: skipped, torch sees no CUDA device")
    root = Path(__file__).parents[1]
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], cwd=root)
    rows: list[Row] = [
        {"what": "tests marked gpu", "correct": "passed" if tests.returncode == 0 else "FAILED"}
    ]
    for name, shape in SHAPES.items():
        rows += measure_encoder(name, dict(zip(SIZES, shape, strict=True)))
    write_results("gpu", [*rows, *run_kernels("cuda")])


def measure_encoder(name: str, shape: dict[str, int]) -> list[Row]:
    """Tokens a second in bfloat16: transformers padded in sorted batches, against irkit by backend."""
    import torch
    from transformers import AutoModel, BertConfig, ModernBertConfig

    from irkit import Encoder, Ragged

    kind = ModernBertConfig if name.startswith("Modern") else BertConfig
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModel.from_config(kind(vocab_size=30_522, pad_token_id=0, **shape)).save_pretrained(folder)
        theirs = (
            AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
        )
        ours = {
            backend: Encoder.from_pretrained(folder, dtype=torch.bfloat16, attention=backend).cuda()
            for backend in ("sdpa", "flash")
        }
    lengths = torch.empty(PASSAGES).log_normal_(4.2, 0.45).clamp(8, 256).long().sort(descending=True).values
    ids = torch.randint(5, 30_000, (int(lengths.sum()),))
    tokens = Ragged(ids, lengths)
    batches = [
        tuple(part.cuda() for part in tokens[at : at + BATCH].to_padded()) for at in range(0, PASSAGES, BATCH)
    ]
    steps = [step.to("cuda") for step in split(tokens, TOKENS_PER_STEP)]

    @torch.inference_mode()
    def padded() -> Any:
        outputs = [
            theirs(input_ids=i, attention_mask=m.long()).last_hidden_state[m].mean(0) for i, m in batches
        ]
        torch.cuda.synchronize()
        return outputs

    def packed(backend: str) -> Callable[[], Any]:
        @torch.inference_mode()
        def run() -> Any:
            outputs = [ours[backend](step) for step in steps]
            torch.cuda.synchronize()
            return outputs

        return run

    with torch.inference_mode():
        i, m = batches[0]
        expected = theirs(input_ids=i, attention_mask=m.long()).last_hidden_state[m].float()
        got = ours["flash"](tokens[:BATCH].to("cuda")).values.float()
        cosine = torch.nn.functional.cosine_similarity(expected, got, dim=-1).min()
    if cosine < 0.99:
        raise SystemExit(f"gpu: {name} disagrees with transformers, cosine {cosine:.4f}; not timed")
    contenders = {"transformers": padded, **{f"irkit {backend}": packed(backend) for backend in ours}}
    seconds = interleave(contenders)
    layers, d, inner = shape["num_hidden_layers"], shape["hidden_size"], shape["intermediate_size"]
    products = 4 * d * d + (3 if name.startswith("Modern") else 2) * d * inner
    flops = layers * (2 * len(ids) * products + 4 * d * float((lengths.double() ** 2).sum()))
    peak = matmul_peak("bfloat16", 8192)
    return [
        {
            "what": name,
            "contender": contender,
            "correct": f"cosine {cosine:.4f}",
            "tokens/s": len(ids) / min(times),
            "x transformers": ratio(seconds, contender, "transformers"),
            "of peak": flops / min(times) / peak,
        }
        for contender, times in seconds.items()
    ]


def split(tokens: Any, budget: int) -> list[Any]:
    """Neighbouring rows of at most ``budget`` tokens together."""
    steps, start, total = [], 0, 0
    for at, length in enumerate(tokens.lengths.tolist()):
        if total + length > budget and at > start:
            steps.append(tokens[start:at])
            start, total = at, 0
        total += length
    return [*steps, tokens[start:]]
