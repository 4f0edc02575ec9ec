"""Suite ``gpu``: every test marked ``gpu``, every kernel bench and the encoders on CUDA, in under 8 minutes.

Needs no data and no weights: models are random, lengths follow those of MS MARCO passages. Each part is a
process of its own, ``python -m benchmarks.gpu PART FILE``, as an error on a GPU leaves a process of no
further use. What has been measured is written at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import tite
from benchmarks.harness import Row, interleave, matmul_peak, ratio, write_results
from benchmarks.kernels import benches

ROOT = Path(__file__).parents[1]
SECONDS, TESTS, PART = 470, 200, 120  # of all, at most of the tests, and of any other part
PASSAGES, TOKENS_PER_STEP, BATCH = 4096, 32_768, 32
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
KERNELS = ("maxsim", "ragged_pool", "splade_pool")
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
    end, rows = time.monotonic() + SECONDS, list[Row]()
    failed = []
    for name in ("tests", *parts()):
        start = time.monotonic()
        found = run_part(name, min(end - start, TESTS if name == "tests" else PART))
        failed += [name] * any("error" in row for row in found)
        rows += found
        write_results("gpu", rows)  # what is measured stays, whatever comes
        print(f"gpu: {name} took {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if failed:
        raise SystemExit(f"gpu: failed: {', '.join(failed)}; see above")


def parts() -> dict[str, Callable[[], list[Row]]]:
    """What is measured, by name."""
    encoders = {
        name: partial(measure_encoder, name, dict(zip(SIZES, shape, strict=True)), "cuda", PASSAGES)
        for name, shape in SHAPES.items()
    }
    return {
        **encoders,
        "tite": measure_pooling,
        **{f"kernel {name}": partial(bench, name) for name in KERNELS},
    }


def run_part(name: str, limit: float) -> list[Row]:
    """Rows of a part, or one that says what was wrong; after ``limit`` seconds it is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.gpu", name, str(file)]
        if name == "tests":
            beside = ["-n", "8"] if find_spec("xdist") else []  # most of the time kernels are compiled
            command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors"]
            command += [*beside, "--durations=10"]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=max(1.0, limit)).returncode
        except subprocess.TimeoutExpired:
            return [{"what": name, "error": f"stopped after {limit:.0f} s"}]
        if name == "tests":
            return [
                {"what": "tests marked gpu", **({"error": f"code {code}"} if code else {"correct": "passed"})}
            ]
        if code:
            return [{"what": name, "error": f"code {code}"}]
        rows: list[Row] = json.loads(file.read_text())
        return rows


def measure_pooling() -> list[Row]:
    """Encoders that pool, against those that do not."""
    rows = tite.measure("cuda")
    return [*tite.bars(rows, "cuda"), *tite.table(rows)]


def bench(name: str) -> list[Row]:
    """Rows of the bench of a kernel."""
    return [{"kernel": name, **row} for row in benches("cuda")[name].run("cuda")]


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


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(parts()[sys.argv[1]]()))
