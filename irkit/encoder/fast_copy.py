"""A copy of a bfloat16 encoder that is faster on CPUs with AVX512-BF16, and more exact.

Its linear maps multiply bfloat16 by `irkit_kernels.packed_linear`, with activations in the same pass. Hidden
states, sums and norms stay float32. The copy shares the word embeddings. The weights of its linear maps are
the same numbers in another order, so these are in memory twice.
"""

from __future__ import annotations

import copy
import threading
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from irkit_kernels.packed_linear import has_fast
from torch import Tensor, nn

from irkit.encoder.inference import is_inference
from irkit.encoder.linear import is_hooked, is_plain

E = TypeVar("E", bound=nn.Module)

_copies: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Any]] = WeakKeyDictionary()
_lock = threading.Lock()  # so that one thread copies while others wait


def has_fast_copy(encoder: nn.Module) -> bool:
    """Tell whether an encoder has a copy: it is bfloat16, on a CPU that multiplies it by AVX512-BF16.

    On CPUs with AMX it has none: oneDNN multiplies bfloat16 by AMX, several times faster.
    """
    weight: Any = encoder.word_embeddings
    return (
        weight.dtype == torch.bfloat16
        and weight.is_cpu
        and not weight.is_inference()  # whose changes cannot be noticed
        and has_fast("bfloat16")
        and not torch.cpu.get_capabilities().get("amx_bf16", False)
    )


def fast_copy(encoder: E) -> E | None:
    """Return the copy, made anew if a weight has changed; None if there is none, or it cannot stand in.

    It stands in for the encoder in evaluation mode, without gradients, autocast and hooks. As autograd, it
    does not notice a change in place through ``.data``.
    """
    if (
        encoder.training
        or not has_fast_copy(encoder)
        or not is_inference()
        or torch.is_autocast_enabled("cpu")
        or any(map(is_hooked, encoder.modules()))
    ):
        return None
    state = tuple((id(part), part.data_ptr(), part._version) for part in encoder.parameters())
    with _lock:
        known = _copies.get(encoder)
        if known is None or known[0] != state:
            with torch.inference_mode(False), torch.no_grad():
                known = _copies[encoder] = state, _copied(encoder)
    made: E | None = known[1]
    return made


class _Widened(nn.Module):
    """The word embeddings of the encoder; what is looked up becomes float32."""

    def __init__(self, word: nn.Embedding) -> None:
        super().__init__()
        self.word, self.weight = word, word.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.word(ids)
        return rows.float()


def _copied(encoder: Any) -> Any:
    """Copy the encoder, one layer after the other; None if a linear map is more than that."""
    if any(isinstance(module, nn.Linear) and not is_plain(module) for module in encoder.modules()):
        return None
    word, layers = encoder.embeddings.word, encoder.layers
    made = copy.deepcopy(encoder, {id(word): nn.Identity(), id(layers): nn.ModuleList()}).float()
    made.embeddings.word = _Widened(word)
    for layer in layers:
        part: Any = copy.deepcopy(layer).float()
        part.quantize_("bfloat16")
        made.layers.append(part)
    return made
