"""Directories of sentence-transformers: ``modules.json`` and a folder a module.

Versions 2 to 6 are read. What is written of a dense model has the names and keys of version 2, which all
versions and the servers that read these files understand; a multi-vector model is one of version 6.

Source: the loading code of sentence-transformers 6.2.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from irkit.config import read_json
from irkit.encoder.lookup import NoEncoder
from irkit.encoder.weights import write_weights
from irkit.errors import ConfigError, CorruptError, StorageError
from irkit.formats import masked_lm, multi_vector, pylate, router, sparse, static
from irkit.formats.layers import (
    Module,
    Modules,
    known_modules,
    layer_module,
    optional,
    read_layer,
    write_json,
)
from irkit.formats.parts import SIMILARITIES, LoadEncoder, Opened, Parts, SideParts
from irkit.heads import Head, MultiVectorHead, PooledHead, Side, SparseConfig, SparseHead
from irkit.tokenizer import Tokenizer, sentence_settings

__all__ = ["read", "text_encoder", "write"]

_LEGACY_POOLING = {  # in the order in which several are put side by side
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_OUTPUTS = {
    "feature-extraction": "last_hidden_state",
    "fill-mask": "logits",
}  # what a Transformer does, gives
_TASK = "feature-extraction"  # unless its model_type is one of these
_TASKS = {"SparseEncoder": "fill-mask"}
_PLACE = "sentence_transformers.models"
_PLACES = {
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask",
    "HierarchicalTokenPooling": "sentence_transformers.multi_vector_encoder.modules.token_pooling",
    "Projection": "irkit",
    "SparseHead": "irkit",
    "SpladePooling": "sentence_transformers.sparse_encoder.models",
}
_TRANSFORMERS = {  # what starts a sparse model, or the query side of one without an encoder
    "sparse": "sentence_transformers.sparse_encoder.models.MLMTransformer",
    "none": "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding",
}
_LACKING = {
    "irkit.Projection": "layer like the gated or scaled projections of this one; irkit can. Linear ones it "
    "opens after Model.fold",
    "irkit.SparseHead": "head like that of this one (its activation, its vocabulary, or no masked language "
    "model of transformers); irkit can",
}


def read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a directory, see `irkit.formats.read_model`."""
    settings = optional(folder / "config_sentence_transformers.json")
    sides = router.branches(folder, _modules(folder))
    types = (settings.get("model_type"), pylate.model_type(settings), sparse.model_type(sides["document"]))
    kind = str(next(filter(None, types), "SentenceTransformer"))
    if kind not in HEADS:
        raise ConfigError(f"loading {folder}: a {kind}; irkit loads {', '.join(HEADS)} here")
    prompts = _prompts(folder, settings)
    read_side = {
        side: _read_side(folder, modules, kind, settings, load_encoder) for side, modules in sides.items()
    }
    documents = read_side["document"]
    default = settings.get("default_prompt_name")
    if not isinstance(default, str | None):
        raise ConfigError(f"loading {folder}: default_prompt_name is {default!r:.60}, expected str or null")
    similarity = str(settings.get("similarity_fn_name") or "").lower() or None  # PyLate writes MaxSim
    known = SIMILARITIES[documents["head"].kind]
    if kind == "ColBERT" and similarity not in known:
        similarity = None  # early PyLate wrote that of the class it is made of
    if similarity not in (None, *known):
        raise ConfigError(
            f"loading {folder}: similarity_fn_name {similarity!r}, expected one of {', '.join(known)}"
        )
    parts: Parts = {
        "tokenizer": documents["tokenizer"],
        "encoder": documents["encoder"],
        "head": documents["head"],
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_name": similarity,
        "truncate_dim": settings.get("truncate_dim"),
    }
    if "query" in read_side:
        parts["query"] = read_side["query"]
    return parts


def text_encoder(folder: Path, wanted: str | None = None) -> Path:
    """The folder of the Transformer that a directory starts with, for documents.

    Args:
        folder: The directory.
        wanted: What it must do: feature-extraction or fill-mask; None is either.

    Raises:
        ConfigError: It starts with something else, or with one that does something else with a text.
    """
    return _transformer(folder, router.branches(folder, _modules(folder))["document"], wanted)


def _transformer(folder: Path, modules: Modules, wanted: str | None) -> Path:
    if not modules or modules[0][0] not in ("Transformer", "MLMTransformer"):
        found = modules[0][0] if modules else "nothing"
        raise ConfigError(f"loading {folder}: what runs starts with {found}, expected Transformer")
    usual = "fill-mask" if modules[0][0] == "MLMTransformer" else _TASK
    _check_text_encoder(modules[0][1], usual, [wanted] if wanted else list(_OUTPUTS))
    return modules[0][1]


def write(parts: Parts, folder: Path) -> None:
    """Write a directory, see `irkit.formats.write_model`."""
    folder.mkdir(parents=True, exist_ok=True)
    head, query = parts["head"], parts.get("query")
    if query is None:
        modules = written = _write_side(parts, folder)
    else:
        sides: dict[Side, SideParts] = {"query": query, "document": parts}
        branches = {side: _write_side(part, folder, f"{side}_") for side, part in sides.items()}
        router.write(folder, branches)
        modules, written = [("", router.TYPE)], [*branches["query"], *branches["document"]]
    for lacking in _LACKING.keys() & {kind for _, kind in written}:
        warnings.warn(
            f"saving a model: sentence-transformers cannot open it, because it has no {_LACKING[lacking]}",
            stacklevel=4,  # whoever called save_pretrained
        )
    write_json(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": kind}
            for number, (path, kind) in enumerate(modules)
        ],
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": WRITERS[head.kind][0],
            "prompts": parts.get("prompts", {}),
            "default_prompt_name": parts.get("default_prompt_name"),
            "similarity_fn_name": parts.get("similarity_name"),
            **({"truncate_dim": parts["truncate_dim"]} if parts.get("truncate_dim") else {}),
            **sparse.settings(head, head if query is None else query["head"]),
            **multi_vector.settings(head),
        },
    )


def _write_side(parts: SideParts, folder: Path, prefix: str = "") -> list[tuple[str, str]]:
    """Write the modules of one side; the first without a prefix is the directory itself.

    Returns:
        Path and type of each.
    """
    tokenizer, encoder, head = parts["tokenizer"], parts["encoder"], parts["head"]
    kind = _TRANSFORMERS.get("none" if isinstance(encoder, NoEncoder) else head.kind, f"{_PLACE}.Transformer")
    modules = [(f"{prefix}0_{kind.rpartition('.')[2]}" if prefix else "", kind)]
    place = folder / modules[0][0]
    place.mkdir(exist_ok=True)
    if isinstance(encoder, NoEncoder):
        static.write(parts, place)
        if head.lengths:
            write_json(place / "sentence_bert_config.json", _length_settings(head))
        return modules
    if isinstance(head, SparseHead):
        masked_lm.write_encoder(encoder, head, place)
    else:
        encoder.save_pretrained(place)
    tokenizer.save(place)
    settings = {"max_seq_length": tokenizer.max_length, "do_lower_case": tokenizer.do_lower_case}
    if isinstance(head, MultiVectorHead):
        settings |= multi_vector.transformer_settings(head)
    else:
        settings |= _length_settings(head)
    write_json(place / "sentence_bert_config.json", settings)
    for number, (name, settings, tensors) in enumerate(WRITERS[head.kind][1](parts), start=1):
        place = folder / f"{prefix}{number}_{name}"
        place.mkdir()
        write_json(place / "config.json", settings)
        if tensors:
            write_weights(place, tensors)
        modules.append((place.name, f"{_PLACES.get(name, _PLACE)}.{name}"))
    return modules


# ---- reading -----------------------------------------------------------------------------------


def _modules(folder: Path) -> Modules:
    try:
        listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        entries = [(entry["type"], entry["path"]) for entry in listed]
    except OSError as error:
        raise StorageError(f"reading {folder / 'modules.json'}: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError(f"reading {folder / 'modules.json'}: not a list of modules: {error}") from error
    return known_modules(folder, entries, "modules.json")


def _read_side(
    folder: Path, modules: Modules, kind: str, settings: dict[str, Any], load_encoder: LoadEncoder
) -> SideParts:
    if kind == "SparseEncoder" and [name for name, _ in modules] == ["SparseStaticEmbedding"]:
        limits = SparseConfig.parse(sparse.limits(settings), f"loading {folder}")
        parts = static.read(modules[0][1], limits)
        parts["head"].lengths = _lengths(modules[0][1], sentence_settings(modules[0][1]))
        return parts
    root = _transformer(folder, modules, _TASKS.get(kind, _TASK))
    encoder, tokenizer = load_encoder(root), Tokenizer.from_pretrained(root)
    opened = Opened(folder, modules[1:], encoder, tokenizer, settings, sentence_settings(root))
    head = HEADS[kind](opened)
    if not isinstance(head, MultiVectorHead):  # in its configuration
        head.lengths = _lengths(folder, opened.transformer)
    return {"tokenizer": tokenizer, "encoder": encoder, "head": head}


def _lengths(folder: Path, settings: Mapping[str, Any]) -> dict[Side, int]:
    """Tokens at which texts of a side are cut, where the first module says so."""
    given = {side: settings.get(f"{side}_length") for side in get_args(Side)}
    lengths = {side: length for side, length in given.items() if length is not None}
    if any(type(length) is not int or length < 1 for length in lengths.values()):
        raise ConfigError(f"loading {folder}: lengths of {lengths!r:.60}, expected numbers of tokens by side")
    return lengths


def _prompts(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Prompts by name, each after the marker that PyLate puts before it.

    Some authors call the document's prompt otherwise; version 6 looks for these names too, in vain.
    """
    given = settings.get("prompts") or {}
    markers = {side: settings.get(f"{side}_prefix") or "" for side in ("query", "document")}
    named = isinstance(given, dict)
    if not named or not all(isinstance(text, str | None) for text in (*given.values(), *markers.values())):
        raise ConfigError(
            f"loading {folder}: prompts {given!r:.60} and prefixes {markers!r:.60}, expected texts by name"
        )
    prompts = {name: text or "" for name, text in given.items()}
    aliases = (prompts.get(name) for name in ("document", "passage", "corpus"))
    prompts["document"] = next(filter(None, aliases), "")
    for side, marker in markers.items():
        prompts[side] = marker + prompts.get(side, "").removeprefix(marker)
    return prompts


def _check_text_encoder(root: Path, usual: str, tasks: list[str]) -> None:
    """Refuse a Transformer module that gives something else than a vector, or logits, a token."""
    own = sentence_settings(root)
    task = own.get("transformer_task", usual)
    output = own.get("module_output_name", "token_embeddings")
    modalities = own.get("modality_config") or {"text": {}}
    found = modalities.get("text", {}).get("method_output_name", _OUTPUTS.get(task))
    if task not in tasks or output != "token_embeddings" or found != _OUTPUTS[task]:
        expected = " or ".join(f"{name} that gives {_OUTPUTS[name]}" for name in tasks)
        raise ConfigError(
            f"loading {root}: its Transformer does {task} and gives {found} as {output}; expected {expected} "
            "as token_embeddings"
        )
    if "text" not in modalities or "message" in modalities:
        raise ConfigError(f"loading {root}: takes {', '.join(modalities)}; irkit encodes plain text")


def _pooled_head(opened: Opened) -> PooledHead:
    """Pooling, then Dense and Normalize in any order."""
    modules, hidden_size, folder = opened.modules, opened.hidden_size, opened.folder
    if not modules or modules[0][0] != "Pooling":
        found = modules[0][0] if modules else "nothing"
        name = "config_sentence_transformers.json"
        missing = f"; {name} is missing, without which it is taken for a dense model"
        hint = "" if (folder / name).exists() else missing
        raise ConfigError(f"loading {folder}: Transformer is followed by {found}, expected Pooling{hint}")
    layers = [read_layer(name, place, "sentence_embedding") for name, place in modules[1:]]
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


HEADS: dict[str, Callable[[Opened], Head]] = {
    "SentenceTransformer": _pooled_head,
    "MultiVectorEncoder": multi_vector.read_head,
    "ColBERT": pylate.read_head,
    "SparseEncoder": sparse.read_head,
}

# ---- writing -----------------------------------------------------------------------------------


def _length_settings(head: Head) -> dict[str, int]:
    return {f"{side}_length": length for side, length in head.lengths.items()}


def _pooled_modules(parts: SideParts) -> list[Module]:
    head = parts["head"]
    assert isinstance(head, PooledHead)  # by its kind
    return [("Pooling", _pooling_settings(head), {}), *(layer_module(layer) for layer in head.layers)]


def _pooling_settings(head: PooledHead) -> dict[str, Any]:
    common = {"word_embedding_dimension": head.hidden_size, "include_prompt": head.include_prompt}
    chosen = {key: mode in head.pooling for key, mode in _LEGACY_POOLING.items()}
    if [mode for mode in _LEGACY_POOLING.values() if mode in head.pooling] != list(head.pooling):
        return {**common, "pooling_mode": list(head.pooling)}  # only version 6 knows another order
    return {**common, **chosen}


WRITERS: dict[str, tuple[str, Callable[[SideParts], list[Module]]]] = {  # by kind: model_type, modules
    "dense": ("SentenceTransformer", _pooled_modules),
    "multi_vector": ("MultiVectorEncoder", lambda parts: multi_vector.modules(parts["head"])),
    "sparse": ("SparseEncoder", sparse.modules),
}
