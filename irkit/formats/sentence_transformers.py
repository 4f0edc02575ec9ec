"""Directories of sentence-transformers: ``modules.json`` and a folder a module.

Versions 2 to 6 are read. What is written has the names and keys of version 2, which all versions and
the servers that read these files understand.

Source: the loading code of sentence-transformers 6.2.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from irkit.config import read_json
from irkit.encoder.weights import read_weights, write_weights
from irkit.errors import ConfigError, CorruptError, StorageError
from irkit.formats.parts import LoadEncoder, Parts
from irkit.heads import Normalize, PooledHead, Projection
from irkit.tokenizer import Tokenizer, sentence_settings

__all__ = ["read", "write"]

_LEGACY_POOLING = {  # in the order in which several are put side by side
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a directory, see `irkit.formats.read_model`."""
    settings = _optional(folder / "config_sentence_transformers.json")
    kind = settings.get("model_type") or "SentenceTransformer"
    if kind not in HEADS:
        raise ConfigError(f"loading {folder}: a {kind}; irkit loads {', '.join(HEADS)} here")
    modules = _modules(folder)
    if not modules or modules[0][0] != "Transformer":
        found = modules[0][0] if modules else "nothing"
        raise ConfigError(f"loading {folder}: modules.json starts with {found}, expected Transformer")
    root = modules[0][1]
    _check_text_encoder(root)
    encoder = load_encoder(root)
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise ConfigError(
            f"loading {folder}: similarity_fn_name {similarity!r}, expected one of {', '.join(_SIMILARITIES)}"
        )
    return {
        "tokenizer": Tokenizer.from_pretrained(root),
        "encoder": encoder,
        "head": HEADS[kind](modules[1:], encoder.hidden_size, folder),
        "prompts": _prompts(settings.get("prompts") or {}),
        "default_prompt_name": settings.get("default_prompt_name"),
        "similarity_name": similarity,
        "truncate_dim": settings.get("truncate_dim"),
    }


def write(parts: Parts, folder: Path) -> None:
    """Write a directory, see `irkit.formats.write_model`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, head = parts["tokenizer"], parts["head"]
    parts["encoder"].save_pretrained(folder)
    tokenizer.save(folder)
    _write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": tokenizer.max_length, "do_lower_case": tokenizer.do_lower_case},
    )
    names = ["sentence_transformers.models.Transformer"]
    for number, (name, settings, tensors) in enumerate(_head_modules(head), start=1):
        place = folder / f"{number}_{name}"
        place.mkdir()
        _write_json(place / "config.json", settings)
        if tensors:
            write_weights(place, tensors)
        names.append(f"sentence_transformers.models.{name}")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name.rpartition('.')[2]}" if i else "", "type": name}
        for i, name in enumerate(names)
    ]
    _write_json(folder / "modules.json", modules)
    _write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": parts.get("prompts", {}),
            "default_prompt_name": parts.get("default_prompt_name"),
            "similarity_fn_name": parts.get("similarity_name", "cosine"),
            **({"truncate_dim": parts["truncate_dim"]} if parts.get("truncate_dim") else {}),
        },
    )


# ---- reading -----------------------------------------------------------------------------------

Modules = list[tuple[str, Path]]  # class name, folder


def _modules(folder: Path) -> Modules:
    try:
        listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        entries = [(entry["type"], entry["path"]) for entry in listed]
    except OSError as error:
        raise StorageError(f"reading {folder / 'modules.json'}: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError(f"reading {folder / 'modules.json'}: not a list of modules: {error}") from error
    for kind, path in entries:
        if not kind.startswith("sentence_transformers."):
            raise ConfigError(f"loading {folder}: module {kind} is code of its own, which irkit does not run")
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"loading {folder}: module path {path!r} leads out of the directory")
    return [(kind.rpartition(".")[2], folder / path) for kind, path in entries]


def _prompts(given: dict[str, str | None]) -> dict[str, str]:
    """Some authors call the document's prompt otherwise; version 6 looks for these names too, in vain."""
    prompts = {name: text or "" for name, text in given.items()}
    aliases = (prompts.get(name) for name in ("document", "passage", "corpus"))
    return prompts | {"document": next(filter(None, aliases), "")}


def _check_text_encoder(root: Path) -> None:
    """Refuse a Transformer module that gives something else than a vector a token."""
    own = sentence_settings(root)
    task = own.get("transformer_task", "feature-extraction")
    output = own.get("module_output_name", "token_embeddings")
    modalities = own.get("modality_config") or {"text": {}}
    wanted = modalities.get("text", {}).get("method_output_name", "last_hidden_state")
    if task != "feature-extraction" or output != "token_embeddings" or wanted != "last_hidden_state":
        raise ConfigError(
            f"loading {root}: its Transformer does {task} and gives {wanted} as {output}; expected "
            "feature-extraction that gives last_hidden_state as token_embeddings"
        )
    if "text" not in modalities or "message" in modalities:
        raise ConfigError(f"loading {root}: takes {', '.join(modalities)}; irkit encodes plain text")


def _pooled_head(modules: Modules, hidden_size: int, folder: Path) -> PooledHead:
    """Pooling, then Dense and Normalize in any order."""
    if not modules or modules[0][0] != "Pooling":
        found = modules[0][0] if modules else "nothing"
        raise ConfigError(f"loading {folder}: Transformer is followed by {found}, expected Pooling")
    layers = []
    for name, place in modules[1:]:
        if name not in LAYERS:
            raise ConfigError(
                f"loading {folder}: module {name} at {place.name!r}, expected {', '.join(LAYERS)}"
            )
        layers.append(LAYERS[name](place))
    settings = read_json(modules[0][1] / "config.json")
    width = settings.get("embedding_dimension", settings.get("word_embedding_dimension", hidden_size))
    if width != hidden_size:
        raise CorruptError(
            f"loading {folder}: Pooling expects width {width}, the encoder gives {hidden_size}"
        )
    legacy = [mode for key, mode in _LEGACY_POOLING.items() if settings.get(key)]
    return PooledHead(
        hidden_size,
        settings.get("pooling_mode") or legacy or "mean",
        [layer for layer in layers if layer is not None],
        include_prompt=settings.get("include_prompt", True),
    )


def _dense(place: Path) -> Projection:
    settings = _sentence_settings(place)
    layer = Projection(
        settings["in_features"],
        settings["out_features"],
        bias=settings.get("bias", True),
        activation=_activation(
            settings.get("activation_function", "torch.nn.modules.activation.Tanh"), place
        ),
        residual="learned" if settings.get("use_residual") else "none",
    )
    try:
        layer.load_state_dict({name: value.float() for name, value in read_weights(place).items()})
    except RuntimeError as error:
        raise CorruptError(f"loading {place}: {error}") from error
    return layer


def _normalize(place: Path) -> Normalize:
    _sentence_settings(place)
    return Normalize()


def _dropout(_: Path) -> None:
    """Nothing: dropout does nothing outside training."""


def _sentence_settings(place: Path) -> dict[str, Any]:
    settings = _optional(place / "config.json")
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, "sentence_embedding"):
            raise ConfigError(f"loading {place}: {key} is {settings[key]!r}, expected 'sentence_embedding'")
    return settings


def _activation(name: str, place: Path) -> nn.Module:
    """The class that a configuration names; only those of torch.nn, because loading must run no code."""
    found = getattr(nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"loading {place}: activation_function {name!r}, expected one of torch.nn")
    return found()


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


LAYERS: dict[str, Callable[[Path], nn.Module | None]] = {
    "Dense": _dense,
    "Normalize": _normalize,
    "Dropout": _dropout,
}
HEADS: dict[str, Callable[[Modules, int, Path], PooledHead]] = {"SentenceTransformer": _pooled_head}

# ---- writing -----------------------------------------------------------------------------------


def _head_modules(head: PooledHead) -> list[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    """Class name, config.json and weights of each module after the encoder."""
    modules: list[tuple[str, dict[str, Any], dict[str, Tensor]]] = [("Pooling", _pooling_settings(head), {})]
    for layer in head.layers:
        if isinstance(layer, Projection):
            modules.append(("Dense", _dense_settings(layer), layer.state_dict()))
        else:
            modules.append(("Normalize", {}, {}))
    return modules


def _pooling_settings(head: PooledHead) -> dict[str, Any]:
    common = {"word_embedding_dimension": head.hidden_size, "include_prompt": head.include_prompt}
    chosen = {key: mode in head.pooling for key, mode in _LEGACY_POOLING.items()}
    if [mode for mode in _LEGACY_POOLING.values() if mode in head.pooling] != list(head.pooling):
        return {**common, "pooling_mode": list(head.pooling)}  # only version 6 knows another order
    return {**common, **chosen}


def _dense_settings(layer: Projection) -> dict[str, Any]:
    activation = type(layer.activation)
    return {
        "in_features": layer.linear.in_features,
        "out_features": layer.linear.out_features,
        "bias": layer.linear.bias is not None,
        "activation_function": f"{activation.__module__}.{activation.__name__}",
        **({"use_residual": True} if layer.use_residual else {}),
    }


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
