"""What the kernels are timed with on a GPU, the most telling case first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from irkit_kernels.maxsim import maxsim, maxsim_int8, quantize_rows
from irkit_kernels.ragged_pool import pooled_lengths, ragged_pool
from irkit_kernels.ragged_pool.reference import pool_backward, pool_forward
from irkit_kernels.residual_maxsim import TensorTokens, tensor_maxsim
from irkit_kernels.splade_pool import splade_pool
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_layers import layer_cases
from benchmarks.gpu_timing import Case, Device, needs

__all__ = ["KERNELS"]

DIM, QUERY, DOCUMENT = 128, 32, (40, 250)  # of MaxSim: dimensions, tokens of a query and of a document
TERMS, WIDTH = 30_522, 768  # of vocabulary weights and of pooling: those of BERT-base
CENTROIDS, NBITS = 16_384, 4


def maxsim_cases(device: Device) -> Iterator[Case]:
    """Search by one query and by many, a training batch with its gradients, and other precisions."""
    large = device.name == "cuda"
    yield _maxsim(device, 1, 1000 if large else 5, "bfloat16")
    yield _maxsim(device, 32, 128 if large else 5, "bfloat16", gradients=True)
    yield _maxsim(device, 32, 1000 if large else 5, "bfloat16")
    yield _maxsim(device, 1, 1000 if large else 5, "int8")
    yield _maxsim(device, 1, 10, "bfloat16")
    yield _maxsim(device, 1, 1000 if large else 5, "float32")


def splade_cases(device: Device) -> Iterator[Case]:
    """Yield a batch of documents, a training batch with its gradients, and a query."""
    n, tokens = (64, 256) if device.name == "cuda" else (3, 5)
    yield _splade(device, n, tokens, "bfloat16")
    yield _splade(device, max(2, n // 4), tokens, "bfloat16", gradients=True)
    yield _splade(device, 1, 8, "bfloat16")
    yield _splade(device, n, tokens, "float32")


def pool_cases(device: Device) -> Iterator[Case]:
    """Yield windows of two sizes, forward and backward, which are limited by memory alone."""
    n = 8192 if device.name == "cuda" else 16  # a gigabyte
    for window in ((2, 2), (3, 2)):
        for backward in (False, True):
            yield _pool(device, n, window, backward)


def residual_cases(device: Device) -> Iterator[Case]:
    """Yield the candidates of 32 queries, scored by their codes."""
    yield _residual(device, *((20_000, 256) if device.name == "cuda" else (20, 5)))


KERNELS: dict[str, Callable[[Device], Iterator[Case]]] = {
    "layers": layer_cases,
    "maxsim": maxsim_cases,
    "splade_pool": splade_cases,
    "ragged_pool": pool_cases,
    "residual_maxsim": residual_cases,
}


class _Texts:
    """Queries and documents for MaxSim, in every form that a contender wants them in."""

    def __init__(self, device: Device, n_q: int, n_d: int, dtype: str, gradients: bool, seed: int) -> None:
        generator = torch.Generator(device.name).manual_seed(seed)
        lengths = torch.randint(
            DOCUMENT[0], DOCUMENT[1] + 1, (n_d,), generator=torch.Generator().manual_seed(0)
        )
        self.lengths, self.longest, self.n_q = lengths.to(device.name), int(lengths.max()), n_q
        kind = torch.float32 if dtype == "int8" else getattr(torch, dtype)
        self.queries, self.documents = (
            F.normalize(torch.randn(rows, DIM, generator=generator, device=device.name)).to(kind)
            for rows in (n_q * QUERY, int(lengths.sum()))
        )
        self.query_ends = torch.arange(n_q + 1, dtype=torch.int32, device=device.name) * QUERY
        self.ends = F.pad(self.lengths.cumsum(0), (1, 0)).int()
        self.grad = torch.randn(n_q, n_d, generator=generator, device=device.name) if gradients else None
        if dtype == "int8":
            self.quantized = [*quantize_rows(self.queries), *quantize_rows(self.documents)]
            self.queries, self.documents = (x.to(torch.float16) for x in (self.queries, self.documents))
        self.half = self.documents.half()
        if gradients and device.name == "cuda":  # what flash-maxsim trains with
            split = list(self.half.split(lengths.tolist()))
            self.padded = torch.nn.utils.rnn.pad_sequence(split, batch_first=True)

    def plain(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Compute all similarities, then the maxima."""
        similarity = documents @ queries.T
        similarity = similarity.to(torch.promote_types(similarity.dtype, torch.float32))
        best = torch.segment_reduce(similarity, "max", lengths=self.lengths, axis=0)
        return best.view(-1, self.n_q, QUERY).sum(2).T

    def step(self, score: Callable[..., Tensor], queries: Tensor, documents: Tensor) -> tuple[Tensor, ...]:
        """Return scores, and with ``grad`` the gradients of both sides."""
        if self.grad is None:
            return (score(queries, documents),)
        leaves = [x.detach().requires_grad_() for x in (queries, documents)]
        scores = score(*leaves)
        return scores, *torch.autograd.grad(scores, leaves, self.grad.to(scores.dtype))


def _maxsim(device: Device, n_q: int, n_d: int, dtype: str, gradients: bool = False) -> Case:
    def inputs(seed: int) -> _Texts:
        return _Texts(device, n_q, n_d, dtype, gradients, seed)

    def ours(x: _Texts) -> tuple[Tensor, ...]:
        if dtype == "int8":
            q, q_scales, d, d_scales = x.quantized
            return (maxsim_int8(q, q_scales, x.query_ends, d, d_scales, x.ends),)
        return x.step(lambda q, d: maxsim(q, x.query_ends, d, x.ends), x.queries, x.documents)

    def flash(x: _Texts) -> tuple[Tensor, ...]:
        from flash_maxsim import flash_maxsim_batched_train, flash_maxsim_packed

        if gradients:
            queries = x.queries.half().view(n_q, QUERY, DIM)
            score = lambda q, d: flash_maxsim_batched_train(q, d, doc_lengths=x.lengths)  # noqa: E731
            return x.step(score, queries, x.padded)[:1]
        return (flash_maxsim_packed(x.queries.half(), x.half, x.ends, x.longest)[None],)

    sample = inputs(0)
    nbytes = sum(t.nbytes for t in ((sample.queries, sample.documents))) * (2 if gradients else 1)
    nbytes //= 2 if dtype == "int8" else 1
    ways = {"irkit": ours, "torch": lambda x: x.step(x.plain, x.queries, x.documents)}
    if n_q == 1 or gradients:  # it scores a query at a time where documents are not padded
        ways["flash-maxsim, float16"] = needs("flash_maxsim", flash)
    what = f"{n_q} {'query' if n_q == 1 else 'queries'} x {n_d} documents"
    return Case(
        {"kernel": "maxsim", "shape": what + " and gradients" * gradients, "dtype": dtype},
        dtype,
        inputs,
        ways,
        lambda x: x.step(x.plain, x.queries.double(), x.documents.double()),
        nbytes + 4 * n_q * n_d * (1 + gradients * QUERY),
        2 * n_q * QUERY * len(sample.documents) * DIM,
    )


class _Batch:
    """Hidden states of sequences of one length, and a vocabulary."""

    def __init__(self, device: Device, n: int, tokens: int, dtype: str, gradients: bool, seed: int) -> None:
        generator = torch.Generator(device.name).manual_seed(seed)
        shapes = (n * tokens, WIDTH), (TERMS, WIDTH), (TERMS,), (n, TERMS)
        hidden, weight, bias, grad = (
            torch.randn(shape, generator=generator, device=device.name) for shape in shapes
        )
        parts = hidden, weight / WIDTH**0.5, bias - 2.5  # half of the weights are 0
        self.parts = [x.to(getattr(torch, dtype)) for x in parts]
        self.grad = grad if gradients else None
        self.n, self.tokens = n, tokens
        self.offsets = torch.arange(n + 1, dtype=torch.int32, device=device.name) * tokens
        self.mask = torch.ones(n, tokens, dtype=torch.int64, device=device.name)
        self.head: Any = None  # Sparton's

    def plain(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute all logits, activate them, and take the maxima."""
        logits = F.linear(hidden, weight, bias).view(-1, self.tokens, TERMS)
        return logits.amax(1).relu().log1p()

    def step(self, pool: Callable[..., Tensor], *parts: Tensor) -> tuple[Tensor, ...]:
        """Return weights, and with ``grad`` the gradients of all inputs."""
        if self.grad is None:
            return (pool(*parts),)
        leaves = [x.detach().requires_grad_() for x in parts]
        weights = pool(*leaves)
        return weights, *torch.autograd.grad(weights, leaves, self.grad.to(weights.dtype))


def _splade(device: Device, n: int, tokens: int, dtype: str, gradients: bool = False) -> Case:
    # the peer, whose head shares the weights of the batch
    def sparton(x: _Batch) -> tuple[Tensor, ...]:
        from sparton import SpartonHead

        if x.head is None:
            layer = torch.nn.Linear(WIDTH, TERMS, device=device.name, dtype=x.parts[1].dtype)
            layer.weight, layer.bias = (torch.nn.Parameter(part) for part in x.parts[1:])
            x.head = SpartonHead(TERMS, WIDTH, use_bias=True).to(device.name)
            x.head.tie_weights(layer)
        hidden = x.parts[0].view(n, tokens, WIDTH).detach().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            weights = x.head(hidden, x.mask)
        if x.grad is not None:
            torch.autograd.grad(weights, [hidden, *x.head.parameters()], x.grad.to(weights.dtype))
        return (weights,)

    # float64, of two rows where no gradient needs all
    def exact(x: _Batch) -> tuple[Tensor, ...]:
        hidden, *rest = (part.double() for part in x.parts)
        return x.step(x.plain, hidden if gradients else hidden[: 2 * tokens], *rest)

    # bytes that any implementation reads and writes
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    parts = size * (n * tokens * WIDTH + TERMS * WIDTH + TERMS) * (2 if gradients else 1)
    return Case(
        {
            "kernel": "splade_pool",
            "shape": f"{n} x {tokens}, d {WIDTH}" + " and gradients" * gradients,
            "dtype": dtype,
        },
        dtype,
        lambda seed: _Batch(device, n, tokens, dtype, gradients, seed),
        {
            "irkit": lambda x: x.step(lambda h, w, b: splade_pool(h, x.offsets, w, b), *x.parts),
            "torch": lambda x: x.step(x.plain, *x.parts),
            "sparton": needs("sparton", sparton),
        },
        exact,
        parts + 4 * n * TERMS * (2 if gradients else 1),
        2 * n * tokens * TERMS * WIDTH,
    )


def _pool(device: Device, n: int, window: tuple[int, int], backward: bool) -> Case:
    # sequences as long as MS MARCO's passages, 75 tokens on average
    lengths = torch.empty(n).log_normal_(4.2, 0.45, generator=torch.Generator().manual_seed(0))
    lengths = lengths.clamp(8, 512).long()

    # the tokens of each window, as `embedding_bag` wants them: a list for each window, back to back
    counts = pooled_lengths(lengths, *window)
    offsets, ends = (F.pad(x.cumsum(0), (1, 0)).int() for x in (lengths, counts))
    local = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(counts)
    starts = local * window[1] + offsets[:-1].repeat_interleave(counts)
    sizes = (offsets[1:].repeat_interleave(counts) - starts).clamp(max=window[0])
    bags = F.pad(sizes.cumsum(0), (1, 0))
    tokens = torch.arange(int(bags[-1])) + (starts - bags[:-1]).repeat_interleave(sizes)
    there = [x.to(device.name) for x in (offsets, ends, tokens, bags[:-1])]
    total, few = int(ends[-1]), 8  # sequences that are compared

    # new values for each repetition, so that no cache helps; a forward pass is kept for the gradient
    class Values:
        def __init__(self, seed: int) -> None:
            generator = torch.Generator(device.name).manual_seed(seed)
            shapes = (int(offsets[-1]), WIDTH), (total, WIDTH)
            self.values, self.grad = (
                torch.randn(shape, generator=generator, device=device.name).to(torch.bfloat16)
                for shape in shapes
            )
            self.values.requires_grad_(backward)
            self.outputs: dict[str, Tensor] = {}

    def way(name: str, pool: Callable[[Tensor], Tensor]) -> Callable[[Values], Tensor]:
        def run(x: Values) -> Tensor:
            if not backward:
                return pool(x.values)
            if name not in x.outputs:
                x.outputs[name] = pool(x.values)
            return torch.autograd.grad(x.outputs[name], x.values, x.grad, retain_graph=True)[0]

        return run

    # the reference in float64, of the first sequences
    def exact(x: Values) -> tuple[Tensor, ...]:
        first = offsets[: few + 1]
        if backward:
            return (pool_backward(x.grad[: int(ends[few])].cpu().double(), first, *window),)
        return (pool_forward(x.values[: int(first[-1])].detach().cpu().double(), first, *window),)

    return Case(
        {
            "kernel": "ragged_pool",
            "shape": f"{n} x 75, d {WIDTH}, {window[0]} every {window[1]}" + ", gradient" * backward,
            "dtype": "bfloat16",
        },
        "bfloat16",
        Values,
        {
            "irkit": way(
                "irkit", lambda v: ragged_pool(v, there[0], *window, pooled_offsets=there[1], total=total)
            ),
            "torch": way("torch", lambda v: F.embedding_bag(there[2], v, there[3], mode="mean")),
        },
        exact,
        2 * WIDTH * (int(offsets[-1]) + total),
    )


def _residual(device: Device, documents: int, candidates: int) -> Case:
    # documents of 40 to 100 tokens, and pairs of a query with a candidate
    queries, generator = 32, torch.Generator().manual_seed(0)
    lengths = torch.randint(40, 101, (documents,), generator=generator)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    pairs = torch.stack(
        [
            torch.arange(queries).repeat_interleave(candidates),
            torch.randint(documents, (queries * candidates,), generator=generator),
        ],
        1,
    )
    ends = torch.arange(queries + 1, dtype=torch.int32) * QUERY
    codebook = (torch.arange(256) - 128).to(torch.int8).view(-1, 2**NBITS)
    there = [x.to(device.name) for x in (ends, offsets, codebook, pairs)]
    n, few = int(offsets[-1]), 50  # pairs that are compared

    # new codes and residuals for each repetition
    class Encoded:
        def __init__(self, seed: int) -> None:
            generator = torch.Generator(device.name).manual_seed(seed)
            chance = {"generator": generator, "device": device.name}
            self.queries = F.normalize(torch.randn(queries * QUERY, DIM, **chance)).half()
            self.table = torch.randn(CENTROIDS, queries * QUERY, **chance).half()
            codes = torch.randint(CENTROIDS, (n,), dtype=torch.int32, **chance)
            coefficients = torch.rand(n, 2, **chance).half()
            packed = torch.randint(256, (n, DIM * NBITS // 8), dtype=torch.uint8, **chance)
            self.tokens = TensorTokens(codes, coefficients, packed)

    def score(x: Encoded) -> Tensor:
        return tensor_maxsim(x.queries, x.table, there[0], x.tokens, *there[1:])

    # the CPU, of the first pairs
    def exact(x: Encoded) -> tuple[Tensor, ...]:
        parts = x.queries.cpu(), x.table.cpu(), ends, TensorTokens(*(part.cpu() for part in x.tokens))
        return (tensor_maxsim(*parts, offsets, codebook, pairs[:few]).double(),)

    each = int(lengths[pairs[:, 1]].sum())  # tokens of all candidates
    return Case(
        {
            "kernel": "residual_maxsim",
            "shape": f"{queries} queries x {candidates} candidates, {NBITS} bits",
            "dtype": "float16",
        },
        "float16",
        Encoded,
        {"irkit": score},
        exact,
        each * (4 + 4 + DIM * NBITS // 8) + 2 * each * QUERY,
        2 * each * QUERY * DIM,
    )
