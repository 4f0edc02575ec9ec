"""Reading and writing the weight files of a model directory, and moving weights in and out of an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from irkit.config import read_json
from irkit.encoder.families import Family, NameMap
from irkit.errors import CorruptError, StorageError

__all__ = [
    "BUFFERS",
    "Undrawn",
    "check_finite",
    "export_weights",
    "find_prefix",
    "import_weights",
    "listed_names",
    "read_weights",
    "write_weights",
]

BUFFERS = (".position_ids", ".token_type_ids", "rotary_emb.inv_freq")  # how they end in old checkpoints
_RENAMED = ((".gamma", ".weight"), (".beta", ".bias"))  # norms of checkpoints converted from TensorFlow


class Undrawn(TorchFunctionMode):
    """While it is entered, modules draw no weights: on ``meta`` that would import torch._dynamo, 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, but for `torch.nn.init`, which hands the tensor by name."""
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def read_weights(directory: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory: safetensors, or ``pytorch_model.bin`` without running its code.

    Raises:
        StorageError: There is no weight file.
        CorruptError: A weight file is damaged, or holds numbers that are not finite.
    """
    folder = Path(directory)
    for name, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _torch_file)):
        files = _shards(folder, name)
        if files:
            tensors: dict[str, Tensor] = {}
            for file in files:
                tensors |= read(file)
            check_finite(tensors.items(), folder)
            return tensors
    raise StorageError(
        f"loading {folder}: expected model.safetensors or pytorch_model.bin there, found neither"
    )


def write_weights(directory: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``model.safetensors``; tensors are copied to contiguous memory of the CPU.

    Raises:
        StorageError: Writing failed.
    """
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    path = Path(directory) / "model.safetensors"
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"writing {path}: {error}") from error


def import_weights(
    module: nn.Module, names: NameMap, family: Family, tensors: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Fill ``module`` from the tensors of a checkpoint, strictly; it comes to be on the CPU.

    Args:
        module: Encoder, its parameters named as in ``names``; on the device ``meta`` they take no memory yet.
        names: Our name to the names in the checkpoint.
        family: Prefixes to strip, and heads that may be there.
        tensors: The checkpoint.
        source: Its place, for messages.

    Returns:
        The tensors of task heads, by their names in the checkpoint.

    Raises:
        CorruptError: Weights are missing, left over, or of another shape.
    """
    prefix = find_prefix(tensors, names, family)
    found: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(prefix)
        for old, new in _RENAMED:
            plain = plain.removesuffix(old) + new if plain.endswith(old) else plain
        if f".{plain}".endswith(BUFFERS):
            continue
        if plain.startswith(family.heads):
            heads[name] = tensor
        else:
            found[plain] = tensor
    wanted = [name for parts in names.values() for name in parts]
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        raise CorruptError(
            f"loading {source}: the weights do not fit config.json: missing {listed_names(missing)}, "
            f"left over {listed_names(extra)}"
        )
    for name, parameter in module.named_parameters():
        parts = names[name]
        shapes = [found[part].shape[1:] for part in parts]
        rows = sum(found[part].shape[0] if found[part].dim() else 1 for part in parts)
        if shapes != [parameter.shape[1:]] * len(parts) or rows != parameter.shape[0]:
            raise CorruptError(
                f"loading {source}: {parts[0]} gives {tuple(found[parts[0]].shape)} for {name}, "
                f"config.json says {tuple(parameter.shape)}"
            )
    # what to_empty does; its empty_like of a tensor on ``meta`` imports sympy
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            pieces = [found[part] for part in names[name]]
            parameter.copy_(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
    return {name: tensor.clone() for name, tensor in heads.items()}  # else all of the file stays


def check_finite(tensors: Iterable[tuple[str, Tensor]], source: str | Path) -> None:
    """Raise CorruptError about the first weight that is infinite or no number: all vectors would be."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        numbers = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()  # float8
        extremes = torch.stack(numbers.aminmax())  # a tenth of the time that isfinite takes
        if not bool(extremes.isfinite().all()):
            raise CorruptError(
                f"loading {source}: {name} holds infinite numbers or none; download or save the model again"
            )


def export_weights(parameters: Mapping[str, Tensor], names: NameMap, prefix: str = "") -> dict[str, Tensor]:
    """Undo `import_weights`: tensors (weights or gradients) by their names in the checkpoint."""
    result: dict[str, Tensor] = {}
    for name, parts in names.items():
        pieces = parameters[name].chunk(len(parts))
        result |= {prefix + part: piece for part, piece in zip(parts, pieces, strict=True)}
    return result


def find_prefix(tensors: Mapping[str, Tensor], names: NameMap, family: Family) -> str:
    """What stands before the names of the encoder in a checkpoint with a task head; often nothing."""
    first = names["embeddings.word.weight"][0]
    return next((prefix for prefix in family.prefixes if prefix + first in tensors), "")


def _shards(folder: Path, name: str) -> list[Path]:
    index = folder / f"{name}.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and file.isprintable() and Path(file).name for file in weight_map.values()
        ):
            raise CorruptError(
                f"reading {index}: weight_map {weight_map!r:.60}, expected a file for each weight"
            )
        return [folder / Path(file).name for file in sorted(set(weight_map.values()))]
    return [folder / name] if (folder / name).is_file() else []


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CorruptError(f"reading {file}: {error}; download or save it again") from error


def _torch_file(file: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe file
        raise CorruptError(f"reading {file}: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def listed_names(names: Iterable[str]) -> str:
    """The first few names, and how many there are more."""
    listed = list(names)
    return (", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")) or "nothing"
