"""Copy the weights of a checkpoint into an encoder, and back under the names of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from irkit.encoder.family import Family, NameMap
from irkit.errors import CorruptError

BUFFERS = (".position_ids", ".token_type_ids", "rotary_emb.inv_freq")  # how they end in old checkpoints


class Undrawn(TorchFunctionMode):
    """Skip `torch.nn.init` inside the block; on the device ``meta`` it would import torch._dynamo for 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``; for functions of `torch.nn.init`, return the tensor unchanged instead."""
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def import_weights(
    module: nn.Module, names: NameMap, family: Family, tensors: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Fill ``module`` from the tensors of a checkpoint, strictly, on the CPU.

    Args:
        module: Encoder; may be on the device ``meta``, where parameters take no memory yet. Filled in place.
        names: For each parameter of ``module``, the names of its parts in the checkpoint.
        family: Family of the checkpoint, which says what prefixes and task heads its names can have.
        tensors: Tensors of the checkpoint by name.
        source: Path of the checkpoint, for messages.

    Returns:
        The tensors of task heads, by their names in the checkpoint.

    Raises:
        CorruptError: Weights are missing, left over, or of another shape.
    """
    prefix = find_prefix(tensors, names, family)
    # today's names without prefix; task heads go into ``heads``
    plain_tensors: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = todays_name(name.removeprefix(prefix))
        if f".{plain}".endswith(BUFFERS):
            continue
        if plain.startswith(family.heads):
            heads[name] = tensor
        else:
            plain_tensors[plain] = tensor

    # all names and shapes as config.json says
    expected = {name for parts in names.values() for name in parts}
    missing, extra = sorted(expected - plain_tensors.keys()), sorted(plain_tensors.keys() - expected)
    if missing or extra:
        raise CorruptError(
            f"loading {source}: the weights do not fit config.json: missing {listed_names(missing)}, "
            f"left over {listed_names(extra)}"
        )
    for name, parameter in module.named_parameters():
        parts = names[name]
        shapes = [plain_tensors[part].shape[1:] for part in parts]
        rows = sum(plain_tensors[part].shape[0] if plain_tensors[part].dim() else 1 for part in parts)
        if shapes != [parameter.shape[1:]] * len(parts) or rows != parameter.shape[0]:
            raise CorruptError(
                f"loading {source}: {parts[0]} gives {tuple(plain_tensors[parts[0]].shape)} for {name}, "
                f"config.json says {tuple(parameter.shape)}"
            )

    # take memory as to_empty does, whose empty_like on ``meta`` imports sympy, and copy
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            sources = [plain_tensors[part] for part in names[name]]
            parameter.copy_(torch.cat(sources) if len(sources) > 1 else sources[0])
    return {name: tensor.clone() for name, tensor in heads.items()}  # else all of the file stays


def todays_name(name: str) -> str:
    """Return ``name`` with ``.gamma`` at the end changed to ``.weight``, and ``.beta`` to ``.bias``.

    These are TensorFlow's and torch's names of the parameters of a norm.
    """
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


def export_weights(
    parameters: Mapping[str, Tensor],
    names: NameMap,
    prefix: str = "",
    rows: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """Return weights by their names in the checkpoint, the reverse of `import_weights`.

    Args:
        parameters: Parameters of an encoder, or gradients, by name.
        names: For each parameter, the names of its parts in the checkpoint.
        prefix: Text before each name in the checkpoint.
        rows: For parameters whose parts differ in size, the numbers of rows of the parts.
    """
    result: dict[str, Tensor] = {}
    for name, parts in names.items():
        weight, sizes = parameters[name], (rows or {}).get(name)
        pieces = torch.split(weight, [*sizes]) if sizes and len(parts) > 1 else weight.chunk(len(parts))
        result |= {prefix + part: piece for part, piece in zip(parts, pieces, strict=True)}
    return result


def swap_heads(weight: Tensor, first: int, second: int) -> Tensor:
    """Return the rows of ``weight``, in ``first`` groups of ``second`` parts, as ``second`` groups.

    Families whose query, key and value alternate head by head are changed by ``(heads, 3)`` to one matrix
    after the other, and back by ``(3, heads)``.

    Examples:
        >>> swap_heads(torch.tensor([[1], [2], [3], [4]]), 2, 2).flatten().tolist()
        [1, 3, 2, 4]
    """
    return torch.unflatten(weight, 0, (first, second, -1)).transpose(0, 1).flatten(0, 2)


def find_prefix(tensors: Mapping[str, Tensor], names: NameMap, family: Family) -> str:
    """Return the prefix, such as ``"bert."``, of the encoder's weights in a checkpoint; empty if none fits.

    Checkpoints with a task head usually have a prefix. For the arguments see `import_weights`.
    """
    first = names["embeddings.word.weight"][0]
    return next((prefix for prefix in family.prefixes if prefix + first in tensors), "")


def listed_names(names: Iterable[str]) -> str:
    """Join the first five names and the number of the others to a text for a message."""
    listed = list(names)
    return (", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")) or "nothing"
