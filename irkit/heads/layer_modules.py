"""The module folders of a sentence-transformers directory, and how projections and norms are kept there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irkit.encoder import AnyEncoder
from irkit.errors import ConfigError, CorruptError
from irkit.heads.projection import Normalize, Projection
from irkit.tokenizer import Tokenizer, read_optional
from irkit.utils.weights import read_weights

Modules = list[tuple[str, Path]]  # class name, folder
Module = tuple[str, dict[str, Any], dict[str, Tensor]]  # type as in modules.json, config.json, weights

_TANH = "torch.nn.modules.activation.Tanh"
_LAYERS = "Dense", "Projection", "Normalize", "Dropout"  # a Projection is gated, or has another residual
_OWN = "pylate.models.Dense.Dense", "irkit.Projection", "irkit.SparseHead", "irkit.Head", "irkit.TokenPooling"
_MODELS = "sentence_transformers.models"
UNKNOWN_TO_OTHERS = "saving a model: sentence-transformers cannot open it"
LACKING = {  # modules of irkit: what sentence-transformers lacks, and how to do without
    "irkit.Projection": "layer like the gated or scaled projections of this one; irkit can. Linear ones it "
    "opens after Model.merge_projections",
    "irkit.SparseHead": "head like that of this one (its activation, its vocabulary, or no masked language "
    "model of transformers); irkit can",
    "irkit.TokenPooling": "pooling to a fixed number of vectors; irkit can",
    "irkit.Head": "head like that of this one; irkit can, where the package that the head comes from is "
    "installed",
}


@dataclass(frozen=True)
class OpenedModel:
    """A directory of sentence-transformers, read except for the head.

    Attributes:
        folder: Path of the directory.
        modules: Class name and folder of each module after the Transformer.
        encoder: Encoder of the model.
        tokenizer: Tokenizer of the model; markers may be added to it.
        settings: Content of config_sentence_transformers.json.
        transformer: Content of sentence_bert_config.json.
    """

    folder: Path
    modules: Modules
    encoder: AnyEncoder
    tokenizer: Tokenizer
    settings: dict[str, Any]
    transformer: dict[str, Any]


def known_modules(folder: Path, entries: Iterable[tuple[Any, Any]], file: str) -> Modules:
    """Return the class name and the folder of each module, after a check.

    Args:
        folder: Directory of the model.
        entries: Type and path of each module, as ``file`` lists them.
        file: Name of the file, for messages.

    Raises:
        CorruptError: A type is not a string, or a path is not a printable one.
        ConfigError: A type is neither of sentence-transformers nor of irkit, or a path leads out of
            ``folder``.
    """
    modules: Modules = []
    for kind, path in entries:
        if not isinstance(kind, str) or not isinstance(path, str) or not path.isprintable():
            raise CorruptError(f"reading {folder / file}: type {kind!r}, path {path!r}: no names")
        if not kind.startswith("sentence_transformers.") and kind not in _OWN:
            raise ConfigError(f"loading {folder}: module {kind} is code of its own, which irkit does not run")
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"loading {folder}: module path {path!r} leads out of the directory")
        modules.append((kind.rpartition(".")[2], folder / path))
    return modules


def read_layers(modules: Modules, feature: str) -> list[nn.Module]:
    """Read a layer from each module folder, in order; Dropout modules are left out.

    Args:
        modules: Class name and folder of each module.
        feature: Value that the layers must read and write: sentence_embedding or token_embeddings.

    Raises:
        ConfigError: A class is not known, or a layer reads or writes another feature.
        CorruptError: The weights of a layer do not fit its settings.
    """
    layers: list[nn.Module] = []
    for name, folder in modules:
        if name not in _LAYERS:
            raise ConfigError(
                f"loading {folder.parent}: module {name} at {folder.name!r}, expected {', '.join(_LAYERS)}"
            )
        settings = read_optional(folder / "config.json")
        for key in ("module_input_name", "module_output_name"):
            if settings.get(key) not in (None, feature):
                raise ConfigError(f"loading {folder}: {key} is {settings[key]!r}, expected {feature!r}")
        if name == "Normalize":
            layers.append(Normalize())
        elif name != "Dropout":
            layers.append(_projection(folder, settings))
    return layers


def layer_module(layer: nn.Module, feature: str | None = None) -> Module:
    """Return the type, the settings and the weights to store for a layer.

    Args:
        layer: `Projection` or `Normalize`.
        feature: Value that the layer reads and writes, such as token_embeddings; None writes no such key,
            which means sentence_embedding.
    """
    names = {} if feature is None else {"module_input_name": feature, "module_output_name": feature}
    if not isinstance(layer, Projection):
        return f"{_MODELS}.Normalize", names, {}
    activation = type(layer.activation)
    settings = {
        "in_features": layer.linear.in_features,
        "out_features": layer.linear.out_features,
        "bias": layer.linear.bias is not None,
        "activation_function": f"{activation.__module__}.{activation.__name__}",
        **names,
    }
    more: dict[str, Any]
    if not layer.gated and layer.alpha is None:  # which sentence-transformers computes alike
        kind, more = f"{_MODELS}.Dense", {"use_residual": True} if layer.use_residual else {}
    else:
        residual = "none" if not layer.use_residual else "learned" if layer.alpha is None else "identity"
        kind, more = "irkit.Projection", {"gated": layer.gated, "residual": residual}
    return kind, settings | more, layer.state_dict()


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` to a file as indented JSON in UTF-8."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _projection(folder: Path, settings: dict[str, Any]) -> Projection:
    learned = "learned" if settings.get("use_residual") else "none"
    try:
        layer = Projection(
            settings["in_features"],
            settings["out_features"],
            bias=settings.get("bias", True),
            activation=_activation(settings.get("activation_function", _TANH), folder),
            gated=settings.get("gated", False),
            residual=settings.get("residual", learned),
        )
        layer.load_state_dict({name: value.float() for name, value in read_weights(folder).items()})
    except KeyError as error:
        raise ConfigError(f"loading {folder}: its config.json lacks the key {error}") from error
    except (RuntimeError, TypeError) as error:  # weights of other shapes, settings of other types
        raise CorruptError(f"loading {folder}: {' '.join(str(error).split())}") from error
    return layer


def _activation(name: Any, folder: Path) -> nn.Module:
    """Make the activation with the class name ``name``, such as ``torch.nn.modules.activation.Tanh``.

    Classes outside torch.nn are refused, because they could run foreign code.

    Args:
        name: Name of the class with its module.
        folder: Folder of the layer, for messages.
    """
    home, _, last = str(name).rpartition(".")
    kind = getattr(nn, last, None) if f"{home}.".startswith("torch.nn.") else None
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        with suppress(Exception):  # the class needs arguments, or is not a function of a tensor
            activation: nn.Module = kind()
            if activation(torch.zeros(2, 3)).shape == (2, 3):
                return activation
    raise ConfigError(f"loading {folder}: activation_function {name!r}, expected an activation of torch.nn")
