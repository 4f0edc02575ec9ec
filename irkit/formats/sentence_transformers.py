"""Directories of sentence-transformers: ``modules.json`` and one folder per module.

Versions 2 to 6 are read. A dense model is written with the names and keys of version 2, which all versions
and the servers that read these files understand. A multi-vector model is written as one of version 6. Heads
read and write their own modules, see `irkit.heads.Head.from_modules`.

Where a Router has modules of their own for queries and for documents, `Model.encode` takes the route for
documents, whatever the default route of the Router is. Modules that both routes start with are loaded once
per route.

Source: the loading code and Router of sentence-transformers 6.2.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from irkit.config import read_json
from irkit.encoder import AnyEncoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.encoder.static_encoder import StaticEncoder
from irkit.errors import BadValueError, ConfigError, CorruptError, StorageError
from irkit.formats.parts import SIMILARITIES, Format, LoadEncoder, Parts, SideParts, static_parts
from irkit.formats.router import ROUTER, read_branches, write_routes
from irkit.formats.static import MODULE, TYPE, read_static_side, write_static_side
from irkit.formats.transformer_arguments import check_arguments
from irkit.heads import (
    HEADS,
    Head,
    MultiVectorHead,
    Normalize,
    OpenedModel,
    Side,
    StaticHead,
    registered_name,
)
from irkit.heads.layer_modules import (
    LACKING,
    UNKNOWN_TO_OTHERS,
    Modules,
    known_modules,
    layer_module,
    read_layers,
    write_json,
)
from irkit.heads.sparse_head import SPARSE_MODULES
from irkit.tokenizer import Tokenizer, read_optional, sentence_settings
from irkit.utils.weights import write_weights

_ALIASES = "passage", "corpus"  # names that authors give to the prompt of documents
_ALIASED = "document_prompt_aliases"  # false: they are no names of it
_OUTPUTS = {"feature-extraction": "last_hidden_state", "fill-mask": "logits"}  # task of a Transformer, output


def _read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a directory of sentence-transformers or PyLate, see `irkit.formats.read_model`."""
    settings = read_optional(folder / "config_sentence_transformers.json")
    sides = read_branches(folder, _modules(folder))
    kind = str(settings.get("model_type") or _implied_type(settings, sides["document"]))
    if kind not in _READERS and kind != Head.model_type:
        raise ConfigError(f"loading {folder}: a {kind}; irkit loads {', '.join(_READERS)} here")
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
        similarity = None  # early PyLate wrote the type of its base class
    if similarity not in (None, *known):
        raise ConfigError(
            f"loading {folder}: similarity_fn_name {similarity!r}, expected one of {', '.join(known)}"
        )
    of_both = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_name": similarity,
        "truncate_dim": settings.get("truncate_dim"),
        **({"query": read_side["query"]} if "query" in read_side else {}),
    }
    return cast(Parts, {**documents, **of_both})


def first_module(folder: Path) -> Path | None:
    """Return the folder of the first module that runs for documents; None if there are no modules."""
    modules = read_branches(folder, _modules(folder))["document"]
    return modules[0][1] if modules else None


def text_encoder(folder: Path) -> Path:
    """Return the folder of the Transformer module that encodes the documents of a model directory.

    Raises:
        ConfigError: The first module is not a Transformer, or its output is neither a vector nor logits per
            token.
    """
    return _transformer(folder, read_branches(folder, _modules(folder))["document"], *_OUTPUTS)


def _write(parts: Parts, folder: Path) -> None:
    """Write a directory of sentence-transformers, see `irkit.formats.write_model`."""
    head, query = parts["head"], parts.get("query")
    if head.parts:
        raise BadValueError(
            "saving a model: format 'sentence-transformers' has no place for several heads; save the model "
            "as 'several-heads', or one of model.heads"
        )
    # modules of both sides, or of each side with a router
    folder.mkdir(parents=True, exist_ok=True)
    if query is None:
        modules = written = _write_side(parts, folder)
    else:
        sides: dict[Side, SideParts] = {"query": query, "document": parts}
        branches = {side: _write_side(part, folder, f"{side}_") for side, part in sides.items()}
        write_routes(folder, branches)
        modules, written = [("", ROUTER)], [*branches["query"], *branches["document"]]
    prompts = parts.get("prompts", {})
    aliased = bool(prompts.get("document")) or not any(prompts.get(name) for name in _ALIASES)
    # files that name the modules
    for lacking in LACKING.keys() & {kind for _, kind in written}:
        warnings.warn(
            f"{UNKNOWN_TO_OTHERS}, because it has no {LACKING[lacking]}",
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
            "model_type": head.model_type,
            "prompts": prompts,
            **({} if aliased else {_ALIASED: False}),
            "default_prompt_name": parts.get("default_prompt_name"),
            "similarity_fn_name": parts.get("similarity_name"),
            **({"truncate_dim": parts["truncate_dim"]} if parts.get("truncate_dim") else {}),
            **head.directory_settings(head if query is None else query["head"]),
        },
    )


def _write_side(parts: SideParts, folder: Path, prefix: str = "") -> list[tuple[str, str]]:
    """Write the modules of one side, each to a folder in ``folder``.

    Args:
        parts: Tokenizer, encoder and head of the side.
        folder: Directory of the model.
        prefix: Start of the names of module folders. If it is empty, the Transformer is written to
            ``folder`` itself.

    Returns:
        Path, relative to ``folder``, and type of each module, in order.
    """
    tokenizer, encoder, head = parts["tokenizer"], parts["encoder"], parts["head"]
    is_static = isinstance(encoder, StaticEncoder)
    kind = TYPE if is_static else head.transformer_type
    modules = [(f"{prefix}0_{kind.rpartition('.')[2]}" if prefix else "", kind)]
    first = folder / modules[0][0]
    first.mkdir(exist_ok=True)
    if is_static:
        write_static_side(parts, first)
    else:
        head.save_encoder(cast(AnyEncoder, encoder), first)  # a static head stands for an encoder, too
        tokenizer.save(first)
    settings: dict[str, Any] = {}
    if not isinstance(encoder, InferenceFreeEncoder):
        settings = {"max_seq_length": tokenizer.max_length, "do_lower_case": tokenizer.do_lower_case}
    if settings := settings | head.transformer_settings():
        write_json(first / "sentence_bert_config.json", settings)
    return modules + write_modules(head, encoder, folder, prefix)


def write_modules(head: Head, encoder: Any, folder: Path, prefix: str = "") -> list[tuple[str, str]]:
    """Write the modules of a head, without the Transformer, each to a folder whose name has a ``prefix``.

    Returns:
        Path, relative to ``folder``, and type of each module, in order.
    """
    modules = []
    static = isinstance(encoder, StaticEncoder)  # whose module pools
    listed = map(layer_module, head.layers) if static else head.to_modules(encoder)
    for number, (kind, settings, tensors) in enumerate(listed, start=1):
        if kind == "irkit.Head":
            settings = settings | {"head": registered_name(head)}
        path = f"{prefix}{number}_{kind.rpartition('.')[2]}"
        (folder / path).mkdir(parents=True)
        write_json(folder / path / "config.json", settings)
        if tensors:
            write_weights(folder / path, tensors)
        modules.append((path, kind))
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


def _implied_type(settings: dict[str, Any], modules: Modules) -> str:
    """Return the ``model_type`` of a directory that lacks one, such as a directory of early PyLate.

    Args:
        settings: Content of config_sentence_transformers.json.
        modules: Class name and folder of each module.
    """
    if "query_prefix" in settings or "do_query_expansion" in settings:
        return "ColBERT"
    sparse = any(name in SPARSE_MODULES for name, _ in modules)
    return "SparseEncoder" if sparse else "SentenceTransformer"


def _read_side(
    folder: Path, modules: Modules, kind: str, settings: dict[str, Any], load_encoder: LoadEncoder
) -> SideParts:
    if kind == "SparseEncoder" and [name for name, _ in modules] == ["SparseStaticEmbedding"]:
        _, home = modules[0]
        tokenizer = Tokenizer.from_pretrained(home)
        static = StaticHead.from_folder(home, tokenizer, settings)
        static.read_lengths(_lengths(home, sentence_settings(home)))
        return static_parts(tokenizer, static)
    if modules and modules[0][0] == MODULE:
        static_side = read_static_side(modules)
        static_side["head"].read_lengths(_lengths(folder, sentence_settings(modules[0][1])))
        return static_side
    root = _transformer(folder, modules, _HEADS.get(kind, Head).transformer_task)
    encoder, tokenizer = load_encoder(root), Tokenizer.from_pretrained(root)
    opened = OpenedModel(folder, modules[1:], encoder, tokenizer, settings, sentence_settings(root))
    return {"tokenizer": tokenizer, "encoder": encoder, "head": read_head(kind, opened)}


def read_head(kind: str, opened: OpenedModel) -> Head:
    """Read the head of a model of ``kind``, the ``model_type`` of config_sentence_transformers.json."""
    head = _READERS.get(kind, _read_added_head)(opened)
    head.read_lengths(_lengths(opened.folder, opened.transformer))
    return head


def _read_added_head(opened: OpenedModel) -> Head:
    """Read a head that another package adds; config.json of the module after the Transformer gives its name.

    Raises:
        ConfigError: No installed package adds a head of this name.
    """
    settings = read_json(opened.modules[0][1] / "config.json") if opened.modules else {}
    name = settings.get("head")
    if name not in HEADS:
        raise ConfigError(
            f"loading {opened.folder}: a head named {name!r:.60}, which no installed package adds; irkit has "
            f"{', '.join(HEADS)}"
        )
    return HEADS[str(name)].from_modules(opened)


def _lengths(folder: Path, settings: Mapping[str, Any]) -> dict[Side, int]:
    """Read ``query_length`` and ``document_length``: the number of tokens at which texts of a side are cut.

    Args:
        folder: Directory of the model, for messages.
        settings: Content of sentence_bert_config.json in the folder of the first module.

    Returns:
        Length by side, without the sides that ``settings`` gives no length for.
    """
    by_side = {side: settings.get(f"{side}_length") for side in get_args(Side)}
    lengths = {side: length for side, length in by_side.items() if length is not None}
    if any(type(length) is not int or length < 1 for length in lengths.values()):
        raise ConfigError(f"loading {folder}: lengths of {lengths!r:.60}, expected numbers of tokens by side")
    return lengths


def _prompts(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the prompts by name; ``"query"`` and ``"document"`` begin with PyLate's markers, if any.

    Some authors name the document prompt "passage" or "corpus", so these prompts also count as
    ``"document"``, also beside an empty one. Version 6 of sentence-transformers is meant to accept these
    names too, but does not find them. Where irkit saved the empty prompt, its own key says so.

    Args:
        folder: Directory of the model, for messages.
        settings: Content of config_sentence_transformers.json.
    """
    saved = settings.get("prompts") or {}
    markers = {side: settings.get(f"{side}_prefix") or "" for side in ("query", "document")}
    named = isinstance(saved, dict)
    if not named or not all(isinstance(text, str | None) for text in (*saved.values(), *markers.values())):
        raise ConfigError(
            f"loading {folder}: prompts {saved!r:.60} and prefixes {markers!r:.60}, expected texts by name"
        )
    prompts = {name: text or "" for name, text in saved.items()}
    names = ("document", *(_ALIASES if settings.get(_ALIASED, True) else ()))
    prompts["document"] = next(filter(None, map(prompts.get, names)), "")
    for side, marker in markers.items():
        prompts[side] = marker + prompts.get(side, "").removeprefix(marker)
    return prompts


def _transformer(folder: Path, modules: Modules, *tasks: str) -> Path:
    """Return the folder of the first module, after a check that it is a Transformer for text.

    Args:
        folder: Directory of the model, for messages.
        modules: Class name and folder of each module.
        tasks: Allowed values of ``transformer_task``, such as ``"fill-mask"``.

    Raises:
        ConfigError: The first module is not a Transformer, does another task, takes other input than text, or
            gives transformers arguments that irkit does not have.
    """
    if not modules or modules[0][0] not in ("Transformer", "MLMTransformer"):
        first = modules[0][0] if modules else "nothing"
        raise ConfigError(f"loading {folder}: what runs starts with {first}, expected Transformer")
    name, root = modules[0]
    own = sentence_settings(root)
    task = own.get("transformer_task", "fill-mask" if name == "MLMTransformer" else "feature-extraction")
    output = own.get("module_output_name", "token_embeddings")
    modalities = own.get("modality_config") or {"text": {}}
    result = modalities.get("text", {}).get("method_output_name", _OUTPUTS.get(task))
    if task not in tasks or output != "token_embeddings" or result != _OUTPUTS[task]:
        expected = " or ".join(f"{name} that gives {_OUTPUTS[name]}" for name in tasks)
        raise ConfigError(
            f"loading {root}: its Transformer does {task} and gives {result} as {output}; expected "
            f"{expected} as token_embeddings"
        )
    if "text" not in modalities or "message" in modalities:
        raise ConfigError(f"loading {root}: takes {', '.join(modalities)}; irkit encodes plain text")
    check_arguments(root, own)
    return root


# ---- models of PyLate --------------------------------------------------------------------------


def _read_pylate_head(opened: OpenedModel) -> Head:
    """Read the Dense modules and the settings that PyLate keeps in config_sentence_transformers.json.

    A missing setting has PyLate's default. A marker that is in the vocabulary becomes one token wherever a
    text holds it, because PyLate inserts it as one token.

    Source: the saving code of PyLate 1.6.
    """
    settings = opened.settings
    for key in ("query_prefix", "document_prefix"):
        opened.tokenizer.add_marker(settings.get(key) or "", new=False)
    length = settings.get("query_length") or 32
    attend = bool(settings.get("attend_to_expansion_tokens"))
    expands = settings.get("do_query_expansion") is not False
    words = settings.get("skiplist_words")  # punctuation where there are none
    config = {
        "query_length": None if expands else length,  # the length of expanded queries
        "document_length": settings.get("document_length") or 180,
        "query_expansion": {"length": length, "attend": attend} if expands else None,
        **({} if words is None else {"skiplist_words": words}),
    }
    layers = [*read_layers(opened.modules, "token_embeddings"), Normalize()]
    source = f"loading {opened.folder}"
    return MultiVectorHead.from_layers(opened.encoder, opened.tokenizer, layers, config, source)


_HEADS = {HEADS[name].model_type: HEADS[name] for name in ("dense", "multi_vector", "sparse")}
_READERS: dict[str, Callable[[OpenedModel], Head]] = {  # by model_type
    **{kind: head.from_modules for kind, head in _HEADS.items()},
    "ColBERT": _read_pylate_head,
}

SENTENCE_TRANSFORMERS = Format(
    lambda folder: (folder / "modules.json").is_file(), _read, _write, query_side=True
)
