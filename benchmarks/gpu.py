"""Suite ``gpu``: every test marked ``gpu``, every kernel bench and the encoders on CUDA, in under 8 minutes.

Needs no data and no weights: models are random, lengths follow those of MS MARCO passages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import tite
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
        print("gpu: skipped, torch sees no CUDA device")
        raise SystemExit(0)
    root = Path(__file__).parents[1]
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], cwd=root)
    passed = tests.returncode == 0
    rows: list[Row] = [{"what": "tests marked gpu", "correct": "passed" if passed else "FAILED"}]
    for name, shape in SHAPES.items():
        rows += measure_encoder(name, dict(zip(SIZES, shape, strict=True)), "cuda", PASSAGES)
        write_results("gpu", rows)  # what is measured stays, whatever comes
    pooling = tite.measure("cuda")
    rows += [*tite.bars(pooling, "cuda"), *tite.table(pooling)]
    write_results("gpu", rows)
    write_results("gpu", [*rows, *run_kernels("cuda")])
    if not passed:
        raise SystemExit("gpu: tests failed, see above")


def measure_encoder(name: str, shape: dict[str, int], device: str, passages: int) -> list[Row]:
    """Tokens a second in bfloat16: transformers padded in sorted batches, against irkit by backend."""
    import torch
    from transformers import AutoModel, BertConfig, ModernBertConfig

    from irkit import Encoder, Ragged
    from irkit.model.batching import plan_steps

    kind = ModernBertConfig if name.startswith("Modern") else BertConfig
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModel.from_config(kind(vocab_size=30_522, pad_token_id=0, **shape)).save_pretrained(folder)
        theirs = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        theirs = theirs.to(device).eval()
        ours = {
            backend: Encoder.from_pretrained(folder, dtype=torch.bfloat16, attention=backend).to(device)
            for backend in (("flash", "sdpa") if device == "cuda" else ("sdpa",))
        }
    lengths = torch.empty(passages).log_normal_(4.2, 0.45).clamp(8, 256).long().sort(descending=True).values
    ids = torch.randint(5, 30_000, (int(lengths.sum()),))
    tokens = Ragged(ids, lengths)
    steps = [tokens[rows].to(device) for rows in plan_steps(lengths, TOKENS_PER_STEP)]
    batches = [
        tuple(part.to(device) for part in tokens[at : at + BATCH].to_padded())
        for at in range(0, passages, BATCH)
    ]

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def padded() -> Any:
        outputs = [theirs(input_ids=i, attention_mask=m.long()).last_hidden_state[m] for i, m in batches]
        wait()
        return outputs

    def packed(backend: str) -> Callable[[], Any]:
        @torch.inference_mode()
        def run() -> Any:
            outputs = [ours[backend](step).values for step in steps]
            wait()
            return outputs

        return run

    expected = torch.cat(padded()).float()
    cosine = 1.0
    for backend in ours:
        got = torch.cat(packed(backend)()).float()
        cosine = min(cosine, float(torch.nn.functional.cosine_similarity(expected, got, dim=-1).min()))
    if cosine < 0.99:
        raise SystemExit(f"gpu: {name} disagrees with transformers, cosine {cosine:.4f}; not timed")
    contenders = {"transformers": padded, **{f"irkit {backend}": packed(backend) for backend in ours}}
    seconds = interleave(contenders)
    layers, d, inner = shape["num_hidden_layers"], shape["hidden_size"], shape["intermediate_size"]
    products = 4 * d * d + (3 if name.startswith("Modern") else 2) * d * inner
    flops = layers * (2 * len(ids) * products + 4 * d * float((lengths.double() ** 2).sum()))
    peak = matmul_peak("bfloat16", 8192 if device == "cuda" else 512)
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
