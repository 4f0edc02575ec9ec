"""Which launches of Triton kernels tune again, and that measurements are stored; needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from irkit_kernels._testing import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the interpreter has one configuration", allow_module_level=True)

from irkit_kernels._tuning import size_class  # needs triton

KERNELS = {"maxsim": "score", "residual_maxsim": "score", "splade_pool": "pool", "ragged_pool": "fill"}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable[[Any], Any]], list[Any]]]:
    """Run calls of a kernel's module and count the tunings of each; nothing is launched."""

    def run(name: str, *calls: Callable[[Any], Any]) -> list[int]:
        module = import_module(f"irkit_kernels.{name}.triton_kernel")
        kernel, measured, counts = getattr(module, KERNELS[name]), [], []

        def benchmark(kernel_call: Callable[[], object], quantiles: object) -> list[float]:
            measured.append(kernel_call)
            return [1.0] * 3

        with monkeypatch.context() as patch:
            patch.setattr(kernel, "cache", {})
            patch.setattr(kernel, "cache_results", False)
            patch.setitem(vars(kernel), "do_bench", benchmark)
            patch.setattr(kernel.fn, "run", lambda *_, **__: None)
            for call in calls:
                before = len(measured)
                call(module)
                assert (len(measured) - before) % len(kernel.configs) == 0
                counts.append((len(measured) - before) // len(kernel.configs))
        return counts

    return run


def ends(*lengths: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)


@pytest.mark.parametrize("name", KERNELS)
def test_every_flag_that_changes_the_code_is_in_the_key(name):
    kernel = getattr(import_module(f"irkit_kernels.{name}.triton_kernel"), KERNELS[name])
    flags = {p.name for p in kernel.fn.params if p.is_constexpr} - set(kernel.configs[0].kwargs)
    assert set(kernel.keys) == flags | {"size"}
    assert kernel.cache_results
    assert kernel.fn.do_not_specialize == ["size"]  # or each class would be compiled for itself


def test_maxsim_is_tuned_by_size_pairs_and_maxima(tuned):
    from irkit_kernels.maxsim.reference import Tokens

    def score(
        n: int, pairs: bool = False, with_argmax: bool = False, length: int = 60
    ) -> Callable[[Any], Any]:
        queries = Tokens(torch.zeros(32, 128), ends(32))
        documents = Tokens(torch.zeros(n * length, 128), ends(*[length] * n))
        rows = torch.stack([torch.zeros(n, dtype=torch.int64), torch.arange(n)], 1) if pairs else None
        return lambda module: module.forward(queries, documents, rows, with_argmax)

    calls = [
        score(10),
        score(11),
        score(1000),
        score(900),
        score(10, pairs=True),
        score(10, with_argmax=True),
    ]
    assert tuned("maxsim", *calls, score(10, length=300)) == [1, 0, 1, 0, 1, 1, 1]


def test_encoded_documents_are_tuned_by_size(tuned):
    def score(n: int) -> Callable[[Any], Any]:
        table, codes = torch.zeros(64, 32), torch.zeros(60 * n, dtype=torch.uint16)
        pairs = torch.stack([torch.zeros(n, dtype=torch.int64), torch.arange(n)], 1)
        offsets = ends(*[60] * n, dtype=torch.int64)
        return lambda module: module.interaction(table, ends(32), codes, offsets, pairs)

    assert tuned("residual_maxsim", score(10), score(1000), score(11)) == [1, 1, 0]


def test_pooled_weights_are_tuned_by_size_bias_and_activation(tuned):
    def pool(n: int, activation: str = "log1p_relu", bias: bool = True) -> Callable[[Any], Any]:
        hidden, weight = torch.zeros(n * 8, 64), torch.zeros(3000, 64)
        shift = torch.zeros(3000) if bias else None
        return lambda module: module.forward(hidden, ends(*[8] * n), weight, shift, activation, "max")

    calls = [pool(1), pool(64), pool(60), pool(1, "log1p_log1p_relu"), pool(1, bias=False)]
    assert tuned("splade_pool", *calls) == [1, 1, 0, 1, 1]


def test_pooling_is_tuned_by_size(tuned):
    def pool(rows: int) -> Callable[[Any], Any]:
        arguments = torch.zeros(2 * rows, 64), ends(2 * rows), ends(rows), 2, 2, rows, False
        return lambda module: module.pool(*arguments)

    assert tuned("ragged_pool", pool(50), pool(80_000), pool(60)) == [1, 1, 0]


def test_classes_are_few():
    classes = {size_class(n, length) for n in (1, 300, 5000, 10**9) for length in (0, 1, 100, 500, 10**6)}
    assert len(classes) == 12
    assert [size_class(n) for n in (256, 257, 4096, 4097)] == [0, 10, 10, 20]
    assert [size_class(1, n) for n in (32, 33, 128, 129, 512, 513)] == [0, 1, 1, 2, 2, 3]


def test_measurements_outlast_the_process(monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import autotuner

    from irkit_kernels.maxsim.reference import Tokens
    from irkit_kernels.maxsim.triton_kernel import forward, score

    measured = []
    device = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(autotuner, "driver", SimpleNamespace(active=device))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    benchmark = lambda call, quantiles: measured.append(call) or [len(measured)]  # noqa: E731
    monkeypatch.setitem(vars(score), "do_bench", benchmark)
    monkeypatch.setattr(score.fn, "run", lambda *_, **__: None)
    texts = Tokens(torch.zeros(32, 128), ends(32))
    for _ in range(2):  # the second time as in a new process
        monkeypatch.setattr(score, "cache", {})
        forward(texts, texts, None, False)
    assert len(measured) == len(score.configs)  # the second time takes the numbers of the first
    (file,) = tmp_path.rglob("*.autotune.json")
    assert len(json.loads(file.read_text())["configs_timings"]) == len(score.configs)
    assert next(iter(score.cache.values())).all_kwargs() == score.configs[0].all_kwargs()
