"""What a GPU would be asked to do, seen without one: kernels, waits, copies of memory that is not pinned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from irkit_kernels._recording import recording
from torch.nn import functional as F

from irkit import Model
from irkit.core.ragged import Ragged
from irkit.encoder import Encoder, attention
from irkit.encoder.attention import attend, pick_backend
from irkit.heads import MultiVectorConfig, MultiVectorHead, Normalize, PooledHead
from irkit.heads.token_pooling import pool_rows
from irkit.model import Pipeline

SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
BERT = {"model_type": "bert", "type_vocab_size": 2, "hidden_dropout_prob": 0.1, **SIZES}
MODERNBERT = {
    "model_type": "modernbert",
    "attention_dropout": 0.1,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    **SIZES,
}
LENGTHS = [1, 12, 7, 30, 2]
GROUPED = {"num_key_value_heads": 1, "head_dim": 8, **SIZES}
FAMILIES: dict[str, dict[str, Any]] = {  # beside those above
    "mpnet": SIZES,
    "t5": {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2},
    "nomic_bert": SIZES,
    "gte": SIZES,
    "qwen3": GROUPED,
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 4, **GROUPED},
}


def batch(lengths: list[int] = LENGTHS) -> Ragged:
    generator = torch.Generator().manual_seed(0)
    return Ragged(torch.randint(5, 99, (sum(lengths),), generator=generator), torch.tensor(lengths))


def counts(record: Any, encoder: Encoder, backend: str, train: bool, partly: bool) -> tuple[int, int]:
    encoder.attention = backend
    encoder.train(train).to(record.device, torch.bfloat16)
    tokens = batch().to(record.device)
    attended = (tokens.lengths - 3).clamp(min=1) if partly else None
    record.clear()
    with torch.set_grad_enabled(train):
        hidden = encoder(tokens, attended).values
        if train:
            hidden.sum().backward()
    assert hidden.isfinite().all()
    record.waits.pop()  # that of the line above
    return len(record.waits), len(record.pageable)


@pytest.mark.sampled
@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("settings", [BERT, MODERNBERT], ids=["bert", "modernbert"])
def test_the_encoder_waits_for_nothing(
    settings: dict[str, Any], backend: str, train: bool, partly: bool, record_dispatch: Any
) -> None:
    encoder = Encoder(settings | {"num_hidden_layers": 3})
    assert counts(record_dispatch, encoder, backend, train, partly) == (0, 0)
    flashed = record_dispatch.operations.count("_flash_attention_forward")
    # where keys are left out, those of a window are not where the kernel looks for them
    assert flashed == (0 if backend != "flash" else 2 if partly and settings is MODERNBERT else 3)
    assert record_dispatch.operations.count("_flash_attention_backward") == flashed * train


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_layer_of_a_family_waits(model_type: str, backend: str, record_dispatch: Any) -> None:
    settings = transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type]).to_dict()
    seen = []
    for layers in (2, 5):
        number = {"num_hidden_layers": layers, "num_layers": layers, "layer_types": None}
        seen.append(counts(record_dispatch, Encoder({**settings, **number}), backend, False, False))
    assert seen[0] == seen[1]
    assert seen[0][0] == 0


FUSED = {  # what runs in kernels without gradients, by family
    "bert": {"row_norm"},
    "modernbert": {"row_norm", "rotary", "gated_product"},
    "nomic_bert": {"row_norm", "rotary", "gated_product"},
    "qwen3": {"row_norm", "rotary", "gated_product"},
    "gemma3_text": {"row_norm", "rotary", "gated_product"},
    "tite": {"row_norm", "rotary", "ragged_pool"},
}


@pytest.mark.parametrize("model_type", FUSED)
def test_kernels_give_the_hidden_states_of_the_cpu(model_type: str, record_dispatch: Any) -> None:
    settings = {"tite": _tite("intra"), "bert": BERT, "modernbert": MODERNBERT}.get(model_type)
    settings = settings or {"model_type": model_type, **FAMILIES[model_type]}
    settings |= {"num_hidden_layers": 3, "layer_types": None}
    if model_type != "tite":
        settings = transformers.AutoConfig.for_model(**settings).to_dict()
    encoder = Encoder(settings).eval()
    tokens = batch()
    with torch.inference_mode():
        expected = encoder(tokens).values
        encoder.to(record_dispatch.device)
        record_dispatch.clear()
        found = encoder(tokens.to(record_dispatch.device)).values.cpu()
    ran = {name.removeprefix("triton:") for name in record_dispatch.operations if name.startswith("triton:")}
    assert ran == FUSED[model_type]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("location", ["pre", "intra", "post"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
def test_layers_that_pool_wait_for_nothing(location: str, backend: str, record_dispatch: Any) -> None:
    assert counts(record_dispatch, Encoder(_tite(location)), backend, True, False) == (0, 0)
    assert record_dispatch.operations.count("triton:ragged_pool") >= 4  # of two layers, and back


def _tite(location: str) -> dict[str, Any]:
    return {
        "model_type": "tite",
        "vocab_size": 99,
        "num_hidden_layers": 3,
        "hidden_sizes": 16,
        "num_attention_heads": 2,
        "intermediate_sizes": 24,
        "kernel_sizes": [None, 2, 2],
        "strides": [None, 2, 2],
        "pooling_location": location,
        "dropout_prob": 0.1,
        "rotary_interleaved": True,
        "positional_embedding_type": "rotary",
    }


@pytest.mark.parametrize(
    "pooling", ["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_pooled_heads_wait_for_nothing(pooling: str, record_dispatch: Any) -> None:
    head = PooledHead(16, pooling, include_prompt=False)
    tokens = batch()
    hidden = tokens.with_values(torch.randn(len(tokens.values), 16))
    expected = head(hidden, tokens, 2).values
    there = hidden.to(record_dispatch.device)
    record_dispatch.clear()
    found = head(there, tokens.to(record_dispatch.device), 2).values
    assert not record_dispatch.waits
    assert not record_dispatch.pageable
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("side", ["query", "document"])
def test_multi_vector_heads_wait_for_nothing(side: Any, record_dispatch: Any) -> None:
    config = MultiVectorConfig(query_expansion={"length": 12})
    head = MultiVectorHead(16, [Normalize()], config, skip_ids=[7, 20, 30, 44], expansion_id=4)
    rows, attended = head.expand(batch(), side)
    values = torch.randn(len(rows.values), 16)
    expected = head(rows.with_values(values), rows, side=side).tokens
    there, values = batch().to(record_dispatch.device), values.to(record_dispatch.device)
    record_dispatch.clear()
    again, attended_there = head.to(record_dispatch.device).expand(there, side)
    found = head(again.with_values(values), again, side=side).tokens
    assert not record_dispatch.waits
    assert not record_dispatch.pageable
    assert (attended is None) == (attended_there is None)
    assert torch.equal(again.values.cpu(), rows.values)
    assert torch.equal(found.lengths, expected.lengths)
    torch.testing.assert_close(found.values.cpu(), expected.values)


@pytest.mark.parametrize(("window", "shorter"), [(None, False), (None, True), (2, False)])
def test_flash_attention_of_torch_is_asked_for_what_eager_writes_out(
    window: int | None, shorter: bool, record_dispatch: Any
) -> None:
    torch.manual_seed(0)
    keys = batch()
    queries = batch([(length + 1) // 2 for length in LENGTHS]) if shorter else keys
    values = [torch.randn(len(rows.values), 2, 8).bfloat16() for rows in (queries, keys, keys)]
    upstream = torch.randn(values[0].shape).bfloat16()
    results = []
    for device, backend in (("cpu", "eager"), ("cuda", "flash")):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        parts = [each.to(device, dtype).requires_grad_() for each in values]
        rows = [rows.to(device).with_values(x) for rows, x in zip((queries, keys, keys), parts, strict=True)]
        out = attend(*rows, backend=backend, window=window)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(out, parts, upstream.to(device, dtype))
        results.append([each.detach().float().cpu() for each in (out, *gradients)])
    assert "_flash_attention_backward" in record_dispatch.operations
    torch.testing.assert_close(results[1], results[0], rtol=2**-7, atol=2**-7)  # bfloat16 has 8 bits


def test_flash_attention_of_torch_drops_weights(record_dispatch: Any) -> None:
    rows = batch().to("cuda")
    torch.manual_seed(0)
    rows = rows.with_values(torch.randn(len(rows.values), 2, 8).bfloat16().to("cuda"))
    found = []
    for dropout, seed in ((0.0, 1), (0.5, 1), (0.5, 1), (0.5, 2)):
        torch.manual_seed(seed)
        found.append(attend(rows, rows, rows, backend="flash", dropout=dropout, window=2).cpu())
    assert record_dispatch.operations.count("_flash_attention_forward") == 4
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[3])


def test_flash_attention_of_no_rows(record_dispatch: Any) -> None:
    empty = batch([]).with_values(torch.zeros(0, 2, 8, dtype=torch.bfloat16)).to("cuda")
    assert attend(empty, empty, empty, backend="flash").shape == (0, 2, 8)
    encoder = Encoder(BERT | {"num_hidden_layers": 1}).to("cuda", torch.bfloat16)
    assert encoder(batch([]).to("cuda")).values.shape == (0, 16)


@pytest.mark.parametrize("lengths", [[], [0, 0], LENGTHS])
def test_rows_that_came_from_the_cpu_are_still_there(lengths: list[int], record_dispatch: Any) -> None:
    rows = batch(lengths)
    there = rows.to(record_dispatch.device)
    record_dispatch.clear()
    assert there.host() is rows
    assert torch.equal(there[:1].host().values, rows[:1].values)
    assert not record_dispatch.waits
    assert torch.equal(there.with_values(there.values + 1).host().values, rows.values + 1)
    assert len(record_dispatch.waits) == 1


@pytest.fixture
def untold() -> None:
    attention._tell.cache_clear()


@pytest.mark.usefixtures("record_dispatch", "untold")
def test_slow_attention_on_a_gpu_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    with pytest.warns(UserWarning, match=r"float32 on CUDA .* dtype='auto' .* attention='sdpa' keeps it"):
        assert pick_backend("auto", gpu, torch.float32) == "sdpa"
    assert pick_backend("auto", gpu, torch.float32) == "sdpa"
    assert pick_backend("sdpa", gpu, torch.float32) == "sdpa"
    assert pick_backend("auto", gpu, torch.bfloat16) == "flash"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.warns(UserWarning, match="padded attention runs.*flash-attn"):
        assert pick_backend("auto", gpu, torch.bfloat16) == "sdpa"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert pick_backend("auto", gpu, torch.float64) == "sdpa"  # which no setting would change


@pytest.mark.usefixtures("record_dispatch", "untold")
def test_heads_that_flash_attention_has_not_are_told_once() -> None:
    rows = batch()
    rows = rows.with_values(torch.randn(len(rows.values), 2, 12).bfloat16()).to("cuda")
    with pytest.warns(UserWarning, match="no heads of width 12"):
        found = attend(rows, rows, rows, backend="flash")
    assert torch.equal(found.cpu(), attend(rows, rows, rows, backend="flash").cpu())


def pooled(rows: Ragged, device: Any, *arguments: Any) -> tuple[Ragged, torch.Tensor]:
    """On the CPU, and the gradient of the vectors."""
    values = rows.values.to(device).requires_grad_()
    found = pool_rows(rows.to(device).with_values(values), *arguments)
    weights = torch.linspace(1, 2, found.values.shape[1]).to(device)
    (gradient,) = torch.autograd.grad((found.values.square() * weights).sum(), values)
    return found.with_values(found.values.detach()).to("cpu"), gradient.cpu()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("factor", "protected", "doubled"),  # each pair of two of them
    [(f, p, (i + j) % 2) for i, f in enumerate([1, 1.5, 2, 3, 20]) for j, p in enumerate([0, 1, 4])],
)
def test_token_pooling_finds_the_clusters_of_scipy(
    factor: float, protected: int, doubled: int, record_dispatch: Any
) -> None:
    generator = torch.Generator().manual_seed(int(10 * factor) + protected)
    lengths = torch.tensor([0, 1, 2, 5, 33, 40, 7, 3, 0, 21])
    values = F.normalize(torch.randn(int(lengths.sum()), 8, generator=generator), dim=1)
    if doubled:  # vectors at no distance at all, most of them several times
        values = values[torch.randint(len(values) // 2, (len(values),), generator=generator)]
    expected, upstream = pooled(Ragged(values, lengths), "cpu", factor, protected)
    found, gradient = pooled(
        Ragged(values, lengths), record_dispatch.device, factor, protected, 3 * 40**2
    )  # in four parts
    assert torch.equal(found.lengths, expected.lengths)
    for row, wanted in zip(found, expected, strict=True):
        assert torch.equal(row[:protected], wanted[:protected])
        near = torch.cdist(row.double(), wanted.double(), compute_mode="donot_use_mm_for_euclid_dist")
        assert near.shape == (0, 0) or near.amin(0).max() <= 1e-6 >= near.amin(1).max()
    torch.testing.assert_close(gradient, upstream)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 4), st.integers(0, 2), st.integers(0, 99))
def test_token_pooling_of_vectors_at_equal_distances(
    lengths: list[int], factor: int, protected: int, seed: int
) -> None:
    """Which of them are joined is anybody's choice, how many there are at most is not."""
    total, sizes = sum(lengths), torch.tensor(lengths, dtype=torch.int64)
    chosen = torch.randint(4, (total,), generator=torch.Generator().manual_seed(seed))
    rows = Ragged(torch.eye(4)[chosen], sizes)
    with recording() as record:
        found = pool_rows(rows.to(record.device), factor, protected).to("cpu")
    for row, vectors in zip(rows, found, strict=True):
        rest = max(0, len(row) - protected)
        assert len(vectors) <= len(row) - rest + (max(rest // factor, 1) if rest else 0)
        assert torch.equal(vectors[:protected], row[:protected])
        assert all(each.any() for each in vectors)


def test_token_pooling_waits_for_few_numbers(record_dispatch: Any) -> None:
    lengths = torch.full((6,), 40)
    values = F.normalize(torch.randn(240, 8), dim=1)
    rows = Ragged(values, lengths).to(record_dispatch.device)
    record_dispatch.clear()
    pool_rows(rows, 2)
    looks = [wait for wait in record_dispatch.waits if "done.all()" in wait]
    assert 1 <= len(looks) <= 10  # every fourth round; how many rounds there are the vectors decide
    assert len(record_dispatch.waits) == len(looks) + 1  # and how many clusters each row has


TEXTS = [
    "neural search",
    "a text",
    "the index of a token in the model",
    "in",
    "",
    "vector search on an index",
]


@pytest.mark.parametrize("kind", ["dense", "multi_vector", "pooled", "sparse"])
def test_encoding_waits_once_for_a_part_while_the_next_is_at_work(
    kind: str, tiny_bert: Any, record_dispatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then where the number of vectors or weights depends on their values, step by step."""
    if kind == "dense":
        with pytest.warns(UserWarning, match="does not say how"):
            model = Model.from_pretrained(tiny_bert, device="cpu", attention="sdpa")
    elif kind == "sparse":
        model = Model.sparse(tiny_bert, {"document_max_active_dims": 4}, device="cpu", attention="sdpa")
    else:
        pooling = {"token_pooling": {"pool_factor": 2}} if kind == "pooled" else {}
        model = Model.multi_vector(tiny_bert, None, pooling, device="cpu", attention="sdpa")
    model.tokens_per_step = 20
    expected = list(model.stream_representations(TEXTS * 3, "document", chunk_size=6))
    model.to(record_dispatch.device)
    begun: list[int] = []
    begin = Pipeline.begin

    def noted(*arguments: Any) -> Any:
        begun.append(len(begun))
        return begin(*arguments)

    monkeypatch.setattr(Pipeline, "begin", noted)
    record_dispatch.clear()
    stream = model.stream_representations(TEXTS * 3, "document", chunk_size=6)
    for place, (found, wanted) in enumerate(zip(stream, expected, strict=True)):
        assert len(begun) == min(place + 2, 3)
        for name, array in wanted.arrays().items():
            arrays = [torch.tensor(each) for each in (found.arrays()[name], array)]
            if kind == "pooled":  # clusters have no order
                arrays = [each.float().sort(0).values for each in arrays]
            torch.testing.assert_close(*arrays)
    synchronized = [wait for wait in record_dispatch.waits if wait.startswith("synchronize")]
    assert len(synchronized) == 3
    if kind in ("dense", "multi_vector"):
        assert record_dispatch.waits == synchronized
        assert not record_dispatch.pageable
