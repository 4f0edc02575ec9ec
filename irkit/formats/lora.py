"""Merge a LoRA adapter of PEFT into the model that the adapter was trained on.

The result is a model directory in the cache, so whatever reads model directories reads it.

Source: Hu et al. 2021, arXiv 2106.09685, section 4.1; Kalajdzievski 2023, arXiv 2312.03732 (``use_rslora``);
for names and settings the files that PEFT 0.21 writes.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from irkit.config import read_json
from irkit.errors import ConfigError, CorruptError, reraise_as
from irkit.formats.sentence_transformers import first_module, text_encoder
from irkit.utils.cache import cached, file_key
from irkit.utils.weights import read_weights, write_weights

_SETTINGS = "adapter_config.json"
_FILES = re.compile(r"adapter_(config\.json|model\.\w+)|README\.md")
_WEIGHTS = re.compile(r"(model|pytorch_model)[\w-]*\.(safetensors|bin)(\.index\.json)?")
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?")
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)
_REBASED = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # ways to begin that change the weights of the model, too
_NONE = torch.empty(0)
_MERGE = "merge both with PEFT's merge_and_unload() and save that"


def merged_model(folder: Path, find: Callable[[str], Path]) -> Path:
    """Return the directory of the same model without an adapter: ``folder`` itself if it holds none.

    Args:
        folder: Directory of a model, or of an adapter alone.
        find: Returns the directory of a model by name; called with the name that the adapter gives, as
            ``name@revision`` if the adapter gives a revision and the name is not a directory.

    Raises:
        ConfigError: The adapter is not a LoRA, or cannot be added to weights.
        CorruptError: The adapter does not fit the model.
        StorageError: The model of the adapter is not found, or the cache cannot be written.
    """
    adapter = _adapter(folder)
    if adapter is None:
        return folder
    settings = _read_settings(adapter)
    name, revision = str(settings["base_model_name_or_path"]), settings.get("revision")
    base = find(f"{name}@{revision}" if revision and not Path(name).is_dir() else name)
    if (base / _SETTINGS).is_file():
        raise ConfigError(
            f"loading {adapter}: the model of the adapter, {name}, is an adapter itself; {_MERGE}"
        )
    encoder = text_encoder(base) if (base / "modules.json").is_file() else base
    # a directory of sentence-transformers brings its own modules; an adapter alone takes the modules of its
    # model
    whole = (folder / "modules.json").is_file()
    tree, others = (folder, encoder) if whole else (base, folder)
    within = adapter.relative_to(folder) if whole else encoder.relative_to(base)

    def build(target: Path) -> None:
        def left_out(path: str, names: list[str]) -> set[str]:
            patterns = [_FILES, *[_WEIGHTS] * (Path(path) == tree / within)]
            return {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}

        shutil.copytree(tree, target, ignore=left_out, dirs_exist_ok=True)
        for file in (path for path in others.iterdir() if path.is_file()):
            exists = whole and (target / within / file.name).exists()
            if not exists and not _FILES.fullmatch(file.name) and not _WEIGHTS.fullmatch(file.name):
                shutil.copyfile(file, target / within / file.name)
        with reraise_as(CorruptError, f"loading {adapter}", "save the adapter again"):
            write_weights(target / within, _merge(read_weights(encoder), adapter, settings))

    files = sorted(str(path) for root in (folder, base) for path in root.rglob("*") if path.is_file())
    return cached(("lora", [file_key(file) for file in files]), build)


def _adapter(folder: Path) -> Path | None:
    """Return the folder of the adapter that a model directory runs with; None if it runs without one.

    This is the directory itself, or the folder of its first module. Adapters in other folders, such as the
    checkpoints of a training, are not part of the model.
    """
    if (folder / _SETTINGS).is_file():
        return folder
    inner = [path.parent for path in folder.glob(f"*/{_SETTINGS}")]
    if not inner or not (folder / "modules.json").is_file():
        return None
    first = first_module(folder)
    return first if first in inner else None


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json.

    Raises:
        ConfigError: The adapter is not a LoRA that can be merged, or does not name its model.
    """
    settings = read_json(folder / _SETTINGS)
    kind, first = settings.get("peft_type"), settings.get("init_lora_weights")
    if kind != "LORA":
        raise ConfigError(f"loading {folder}: an adapter of the type {kind!r:.40}, expected LORA; {_MERGE}")
    used = [name for name in _UNSUPPORTED if settings.get(name)]
    if isinstance(first, str) and first.startswith(_REBASED):
        used.append("init_lora_weights")
    if used:
        value = settings[used[0]]
        raise ConfigError(f"loading {folder}: irkit merges no adapter with {used[0]} {value!r:.40}; {_MERGE}")
    if not isinstance(settings.get("base_model_name_or_path"), str):
        raise ConfigError(f"loading {folder}: the adapter does not name its model; {_MERGE}")
    return settings


def _merge(weights: dict[str, Tensor], folder: Path, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of the model with the adapter in ``folder`` added; changed weights are float32.

    Raises:
        CorruptError: The model lacks a weight of the adapter, or has it in another shape.
    """
    tensors = read_weights(folder, "adapter_model")
    factors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if match := _FACTOR.fullmatch(plain):
            side = match[3] + ("_embedding" if match[2] else "")
            factors[match[1]][side] = tensor.float()
        else:  # of a module that was trained whole, or a bias
            weights[_find(plain, weights, folder)] = tensor
    for module, pair in factors.items():
        name = _find(f"{module}.weight", weights, folder)
        of_embedding = "A_embedding" in pair
        down, up = (pair.get(side + "_embedding" * of_embedding, _NONE) for side in "AB")
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
            raise CorruptError(
                f"loading {folder}: the adapter has factors {tuple(down.shape)} and {tuple(up.shape)} for "
                f"{module}, expected (rank, inputs) and (outputs, rank); save the adapter again"
            )
        change = up @ down
        change = change.T if of_embedding or settings.get("fan_in_fan_out") else change
        if change.shape != weights[name].shape:
            raise CorruptError(
                f"loading {folder}: the adapter changes {name} by {tuple(change.shape)}, the model has "
                f"{tuple(weights[name].shape)}; is it the model that the adapter was trained on?"
            )
        alpha = _of_module(module, settings.get("alpha_pattern") or {}, settings.get("lora_alpha", 8))
        scale = alpha / len(down) ** (0.5 if settings.get("use_rslora") else 1)
        weights[name] = weights[name].float() + scale * change
    return weights


def _find(name: str, weights: Iterable[str], folder: Path) -> str:
    """Return the name of a weight in the files of the model, which may have a longer or shorter prefix."""
    matches = [
        known for known in weights if f".{known}".endswith(f".{name}") or f".{name}".endswith(f".{known}")
    ]
    if len(matches) != 1:
        raise CorruptError(
            f"loading {folder}: the adapter changes {name}, of which the model has {len(matches)}; is it the "
            "model that the adapter was trained on?"
        )
    return matches[0]


def _of_module(module: str, patterns: Mapping[str, Any], default: Any) -> float:
    """Return the value of the first pattern that fits the end of the name of a module."""
    fitting = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    return float(next(fitting, default))
