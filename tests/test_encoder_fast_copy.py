"""The copy of a bfloat16 encoder stands in for it where it may, and never shows weights of before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from irkit_kernels.packed_linear import PackedLinear, has_fast
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.encoder.fast_copy import fast_copy, has_fast_copy

pytestmark = pytest.mark.skipif(
    not has_fast("bfloat16") or torch.cpu.get_capabilities().get("amx_bf16", False),
    reason="needs a CPU with AVX512-BF16 and without AMX",
)
TOKENS = Ragged.from_rows([[5, 6, 7, 8, 9, 10, 11], [12, 13], [7]])
SETTINGS: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
}


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(SETTINGS).eval().bfloat16()


@torch.inference_mode()
def run(encoder: Encoder) -> torch.Tensor:
    return encoder(TOKENS).values


def test_it_is_nearer_to_float32(encoder: Encoder) -> None:
    exact = copy.deepcopy(encoder).float()
    with torch.inference_mode():
        wanted, fast = exact(TOKENS).values, encoder(TOKENS).values
    plain = encoder(TOKENS).values  # with gradients
    assert fast.dtype == plain.dtype == torch.bfloat16
    errors = [(found.detach().float() - wanted).square().mean() for found in (fast, plain)]
    assert errors[0] < errors[1]
    with torch.inference_mode():
        made = fast_copy(encoder)
        assert made is not None
        assert fast_copy(encoder) is made
        assert made.embeddings.word.word is encoder.embeddings.word
        kinds = {type(module) for module in made.modules()}
    assert PackedLinear in kinds
    assert torch.nn.Linear not in kinds


def test_rows_do_not_depend_on_each_other(encoder: Encoder) -> None:
    with torch.inference_mode():
        alone = [encoder(TOKENS[i : i + 1]).values for i in range(3)]
    assert torch.equal(torch.cat(alone), run(encoder))


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: encoder.layers[0].up.weight.mul_(0.5),
        lambda encoder: encoder.layers[1].out.bias[:3].add_(1),
        lambda encoder: encoder.load_state_dict(Encoder(SETTINGS).bfloat16().state_dict()),
        lambda encoder: setattr(
            encoder.layers[0].down, "weight", torch.nn.Parameter(torch.ones(64, 96).bfloat16())
        ),
        lambda encoder: encoder.embeddings.word.weight.neg_(),
    ],
    ids=["in place", "bias", "loaded", "replaced", "embeddings"],
)
def test_a_change_of_weights_shows(change: Callable[[Encoder], Any], encoder: Encoder) -> None:
    before = run(encoder)
    with torch.no_grad():
        change(encoder)
    after = run(encoder)
    assert not torch.equal(after, before)
    assert torch.equal(after, run(copy.deepcopy(encoder)))
    assert F.cosine_similarity(after.float(), encoder(TOKENS).values.float()).min() > 0.99


def test_where_it_cannot_stand_in(encoder: Encoder) -> None:
    run(encoder)
    with torch.inference_mode():
        assert has_fast_copy(encoder)
        assert fast_copy(encoder.train()) is None
        assert fast_copy(copy.deepcopy(encoder).float()) is None
        encoder.eval()
        with torch.autocast("cpu"):
            assert fast_copy(encoder) is None
        seen: list[Any] = []
        handle = encoder.layers[1].register_forward_hook(lambda *arguments: seen.append(arguments))
        encoder(TOKENS)
        assert len(seen) == 1
        handle.remove()
        encoder(TOKENS)
        assert len(seen) == 1
    encoder(TOKENS).values.float().sum().backward()
    assert encoder.layers[0].up.weight.grad is not None
    with torch.inference_mode():
        inside = Encoder(SETTINGS).eval().bfloat16()
        assert fast_copy(inside) is None
        inside(TOKENS)


def test_it_is_in_no_file_and_no_copy(encoder: Encoder, tmp_path: Path) -> None:
    size, before = len(pickle.dumps(encoder)), run(encoder)
    assert len(pickle.dumps(encoder)) == size
    assert torch.equal(run(pickle.loads(pickle.dumps(encoder))), before)
    encoder.pack_()  # for a server
    assert torch.equal(run(encoder), before)
    encoder.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert isinstance(again, Encoder)
    assert torch.equal(run(again), before)
