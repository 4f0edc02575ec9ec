"""Read and write the weight files of a model directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from irkit.config import read_json
from irkit.errors import CorruptError, StorageError


def read_weights(directory: str | Path, stem: str = "") -> dict[str, Tensor]:
    """Read all tensors of a model directory, by name, to the CPU.

    The file is ``model.safetensors``, else ``pytorch_model.bin``, whose code is not run; both may be split
    into several files.

    Args:
        directory: Directory of the files.
        stem: Name of the files without suffix, if it is another, such as ``"adapter_model"``.

    Raises:
        StorageError: The directory has no weight file.
        CorruptError: A weight file is damaged, or holds numbers that are not finite.
    """
    folder = Path(directory)
    safe, pickled = f"{stem or 'model'}.safetensors", f"{stem or 'pytorch_model'}.bin"
    for name, read in ((safe, _safetensors), (pickled, _torch_file)):
        files = _shards(folder, name)
        if files:
            tensors: dict[str, Tensor] = {}
            for file in files:
                tensors |= read(file)
            check_finite(tensors.items(), folder)
            return tensors
    raise StorageError(f"loading {folder}: expected {safe} or {pickled} there, found neither")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of one file, by name, to the CPU.

    Args:
        file: A file in safetensors, or one of torch, whose code is not run.

    Raises:
        CorruptError: The file is damaged, or holds numbers that are not finite.
    """
    tensors = _safetensors(file) if file.suffix == ".safetensors" else _torch_file(file)
    check_finite(tensors.items(), file)
    return tensors


def write_weights(directory: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name, from any device, to ``model.safetensors`` in ``directory``.

    Raises:
        StorageError: Writing failed.
    """
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    path = Path(directory) / "model.safetensors"
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"writing {path}: {error}") from error


def check_finite(tensors: Iterable[tuple[str, Tensor]], source: str | Path) -> None:
    """Check that all weights are finite; otherwise a model would give infinite vectors or NaN.

    Args:
        tensors: Pairs of a name and a tensor.
        source: Where the weights come from, for messages.

    Raises:
        CorruptError: A tensor holds an infinite number or NaN; the message names the first such tensor.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        numbers = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()  # float8
        extremes = torch.stack(numbers.aminmax())  # a tenth of the time that isfinite takes
        if not bool(extremes.isfinite().all()):
            raise CorruptError(
                f"loading {source}: {name} holds infinite numbers or none; download or save the model again"
            )


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
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CorruptError(f"reading {file}: {error}; download or save it again") from error


def _torch_file(file: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe file
        raise CorruptError(f"reading {file}: {error}") from error
    if not isinstance(tensors, dict):
        raise CorruptError(f"reading {file}: a {type(tensors).__name__}, expected tensors by name")
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
