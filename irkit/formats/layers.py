"""Modules that follow pooling or tokens in a sentence-transformers directory: reading and writing them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irkit.config import read_json
from irkit.encoder.weights import read_weights
from irkit.errors import ConfigError, CorruptError
from irkit.heads import Normalize, Projection

__all__ = ["Module", "Modules", "known_modules", "layer_module", "optional", "read_layer", "write_json"]

Modules = list[tuple[str, Path]]  # class name, folder
Module = tuple[str, dict[str, Any], dict[str, Tensor]]  # class name, config.json, weights

_TANH = "torch.nn.modules.activation.Tanh"
_OTHERS = (
    "pylate.models.Dense.Dense",
    "irkit.Projection",
    "irkit.SparseHead",
)  # modules outside sentence-transformers


def known_modules(folder: Path, entries: Iterable[tuple[Any, Any]], file: str) -> Modules:
    """Class name and folder of each module that ``file`` lists by type and path.

    Raises:
        CorruptError: These are no names.
        ConfigError: A module is code of its own, or outside the directory.
    """
    modules: Modules = []
    for kind, path in entries:
        if not isinstance(kind, str) or not isinstance(path, str) or not path.isprintable():
            raise CorruptError(f"reading {folder / file}: type {kind!r}, path {path!r}: no names")
        if not kind.startswith("sentence_transformers.") and kind not in _OTHERS:
            raise ConfigError(f"loading {folder}: module {kind} is code of its own, which irkit does not run")
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"loading {folder}: module path {path!r} leads out of the directory")
        modules.append((kind.rpartition(".")[2], folder / path))
    return modules


def read_layer(name: str, place: Path, feature: str) -> nn.Module | None:
    """The layer of a module folder; None for one that does nothing outside training.

    Args:
        name: Class of the module.
        place: Its folder.
        feature: What it must work on: sentence_embedding or token_embeddings.

    Raises:
        ConfigError: There is no such layer, or it works on something else.
        CorruptError: Its weights do not fit its settings.
    """
    if name not in LAYERS:
        raise ConfigError(
            f"loading {place.parent}: module {name} at {place.name!r}, expected {', '.join(LAYERS)}"
        )
    settings = optional(place / "config.json")
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, feature):
            raise ConfigError(f"loading {place}: {key} is {settings[key]!r}, expected {feature!r}")
    return LAYERS[name](place, settings)


def layer_module(layer: nn.Module, feature: str | None = None) -> Module:
    """What is written for a layer.

    Args:
        layer: `Projection` or `Normalize`.
        feature: What it works on, if that is not what versions before 6 expect.
    """
    names = {} if feature is None else {"module_input_name": feature, "module_output_name": feature}
    if not isinstance(layer, Projection):
        return "Normalize", names, {}
    activation = type(layer.activation)
    settings = {
        "in_features": layer.linear.in_features,
        "out_features": layer.linear.out_features,
        "bias": layer.linear.bias is not None,
        "activation_function": f"{activation.__module__}.{activation.__name__}",
        **names,
    }
    if layer.is_dense:
        return "Dense", settings | ({"use_residual": True} if layer.use_residual else {}), layer.state_dict()
    residual = "none" if not layer.use_residual else "learned" if layer.alpha is None else "identity"
    return "Projection", settings | {"gated": layer.gated, "residual": residual}, layer.state_dict()


def optional(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def write_json(path: Path, data: Any) -> None:
    """Write a file that people can read."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _projection(place: Path, settings: dict[str, Any]) -> Projection:
    learned = "learned" if settings.get("use_residual") else "none"
    try:
        layer = Projection(
            settings["in_features"],
            settings["out_features"],
            bias=settings.get("bias", True),
            activation=_activation(settings.get("activation_function", _TANH), place),
            gated=settings.get("gated", False),
            residual=settings.get("residual", learned),
        )
        layer.load_state_dict({name: value.float() for name, value in read_weights(place).items()})
    except KeyError as error:
        raise ConfigError(f"loading {place}: its config.json lacks the key {error}") from error
    except (RuntimeError, TypeError) as error:  # weights of other shapes, settings of other types
        raise CorruptError(f"loading {place}: {' '.join(str(error).split())}") from error
    return layer


def _activation(name: Any, place: Path) -> nn.Module:
    """The class that a configuration names; only those of torch.nn, because loading must run no code."""
    home, _, last = str(name).rpartition(".")
    found = getattr(nn, last, None) if f"{home}.".startswith("torch.nn.") else None
    if isinstance(found, type) and issubclass(found, nn.Module):
        with suppress(Exception):  # of what asks for arguments, or is no function of a tensor
            activation: nn.Module = found()
            if activation(torch.zeros(2, 3)).shape == (2, 3):
                return activation
    raise ConfigError(f"loading {place}: activation_function {name!r}, expected an activation of torch.nn")


LAYERS: dict[str, Callable[[Path, dict[str, Any]], nn.Module | None]] = {
    "Dense": _projection,
    "Projection": _projection,  # irkit's own: gated, or with a residual that sentence-transformers lacks
    "Normalize": lambda place, settings: Normalize(),
    "Dropout": lambda place, settings: None,
}
