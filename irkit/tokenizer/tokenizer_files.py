"""Read the backend of a tokenizer from whichever tokenizer files a model directory has."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, processors
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from irkit.config import read_json
from irkit.errors import ConfigError, CorruptError, StorageError

_GROWTH = 4096  # largest factor by which a normalizer may lengthen a text
_WORDPIECE = {  # classes of transformers that split texts as BERT does
    "BertTokenizer",
    "ConvBertTokenizer",
    "DPRContextEncoderTokenizer",
    "DPRQuestionEncoderTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "LayoutLMTokenizer",
    "LxmertTokenizer",
    "MobileBertTokenizer",
    "RealmTokenizer",
    "RetriBertTokenizer",
    "SqueezeBertTokenizer",
}
_ENDED = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"}  # see _ends_texts
_TEMPLATE = "TemplateProcessing"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
_SIGNS = ("precompiled_charsmap", '"String"', '"Regex"', "\\u")  # of parts that can ask for memory


def sentence_settings(directory: Path) -> dict[str, Any]:
    """Return the content of sentence_bert_config.json, or of the same file under an older name.

    The result is empty if the file does not exist.
    """
    return next((read_json(file) for file in sorted(directory.glob("sentence_*_config.json"))), {})


def given_length(settings: Mapping[str, Any]) -> Any:
    """Return the number of tokens at which texts are cut, by sentence_bert_config.json; None if it has none.

    As in sentence-transformers, ``model_max_length`` among the arguments of the tokenizer counts before
    ``max_seq_length``.
    """
    arguments = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    return arguments.get("model_max_length") or settings.get("max_seq_length")


def read_backend(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Make the backend of a tokenizer from the first kind of tokenizer files that ``folder`` has.

    The order is tokenizer.json, vocab.txt of BERT, vocab.json and merges.txt of RoBERTa, then whatever
    transformers can read. ``settings`` is the content of tokenizer_config.json. Without tokenizer.json, added
    tokens are read from it and from added_tokens.json. Texts of some tokenizers get an end token, see
    `_ends_texts`.

    Raises:
        CorruptError: A file is damaged.
    """
    whole, backend = (folder / "tokenizer.json").is_file(), None
    try:
        if whole:
            _check_normalizer(folder / "tokenizer.json")
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        elif _is_wordpiece(folder, settings):
            backend = BertWordPieceTokenizer(str(folder / "vocab.txt"))._tokenizer
        elif (folder / "merges.txt").is_file() and "<s>" in read_optional(folder / "vocab.json"):
            backend = _byte_level(folder, settings)
        if backend is not None and isinstance(backend.normalizer, normalizers.BertNormalizer):
            own = backend.normalizer
            backend.normalizer = normalizers.BertNormalizer(  # with tokenizer_config.json, as in transformers
                clean_text=own.clean_text,
                handle_chinese_chars=settings.get("tokenize_chinese_chars", own.handle_chinese_chars),
                strip_accents=settings.get("strip_accents", own.strip_accents),
                lowercase=settings.get("do_lower_case", own.lowercase),
            )
        if backend is not None and not whole:
            _add_tokens(backend, folder, settings)
        if backend is not None and _ends_texts(settings):
            _add_end(backend, settings.get("eos_token"))
    except Exception as error:  # the library raises plain Exception for what it cannot parse
        raise CorruptError(f"loading the tokenizer of {folder}: {error}") from error
    return _from_transformers(folder) if backend is None else backend


def _is_wordpiece(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether vocab.txt is of a tokenizer that splits texts as BERT does."""
    file = folder / "vocab.txt"
    if not file.is_file() or "[CLS]" not in file.read_text(encoding="utf-8").split("\n"):
        return False
    name = settings.get("tokenizer_class") or read_optional(folder / "config.json").get("tokenizer_class")
    return not name or str(name).removesuffix("Fast") in _WORDPIECE


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the tokens that files beside the vocabulary list, unless the backend has added them already.

    Raises:
        CorruptError: A token gets another id than the files say.
    """
    numbers: dict[str, int] = dict(read_optional(folder / "added_tokens.json"))
    special = [token_text(token) for key, token in settings.items() if key.endswith("_token")]
    flags: dict[str, Mapping[str, Any]] = {name: {"special": name in special} for name in numbers}
    for token in settings.get("additional_special_tokens") or ():
        flags[token_text(token)] = {**(token if isinstance(token, Mapping) else {}), "special": True}
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        numbers[token["content"]], flags[token["content"]] = int(number), token
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    names = sorted(
        (name for name in flags if name not in known), key=lambda name: numbers.get(name, math.inf)
    )
    given = ({key: flags[name][key] for key in _FLAGS if key in flags[name]} for name in names)
    backend.add_tokens([AddedToken(name, **own) for name, own in zip(names, given, strict=True)])
    for name, number in numbers.items():
        if (got := backend.token_to_id(name)) != number:
            raise CorruptError(
                f"the added token {name!r:.60} has id {got}, expected {number}; save tokenizer.json, too"
            )


def _ends_texts(settings: Mapping[str, Any]) -> bool:
    """Return whether texts end with a token that tokenizer.json may lack.

    This is so if tokenizer_config.json sets ``add_eos_token`` and names code of its own, as in gte-Qwen2, or
    a tokenizer of Llama or Gemma, as in E5-Mistral: transformers ignores the key since version 5, but
    versions before 5 added the token, and the authors' last-token embeddings were made with it.
    """
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    own_code = "AutoTokenizer" in (settings.get("auto_map") or ())
    return bool(settings.get("add_eos_token")) and (own_code or name in _ENDED)


def _add_end(backend: tokenizers.Tokenizer, token: Any) -> None:
    """End each text with a token of the backend, unless texts end with it already.

    The token becomes part of the template that adds other tokens, if there is one: what a second template is
    given are the parts that the first has made, the first token and the text, as if they were two texts.
    """
    token = token_text(token)
    number = backend.token_to_id(token) if isinstance(token, str) else None
    if number is None or backend.encode("a").ids[-1:] == [number]:
        return
    own = backend.post_processor
    state = {} if own is None else json.loads(own.__getstate__())
    parts = (part for part in (state, *state.get("processors", ())) if part.get("type") == _TEMPLATE)
    template = next(parts, None)
    if template is None:
        end = processors.TemplateProcessing(
            single=f"$A {token}", pair=f"$A {token} $B:1 {token}:1", special_tokens=[(token, number)]
        )
        backend.post_processor = end if own is None else processors.Sequence([own, end])
        return
    for kind in ("single", "pair"):
        pieces = []
        for piece in template[kind]:
            pieces.append(piece)
            if "Sequence" in piece:
                pieces.append({"SpecialToken": {"id": token, "type_id": piece["Sequence"]["type_id"]}})
        template[kind] = pieces
    template["special_tokens"][token] = {"id": token, "ids": [number], "tokens": [token]}
    own.__setstate__(json.dumps(state).encode())
    backend.post_processor = own


def _check_normalizer(file: Path) -> None:
    """Check that the normalizer in tokenizer.json does not take too much memory.

    Without this check the library tokenizers would end the process.

    Raises:
        CorruptError: The normalizer is cut, or makes texts many times as long.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if not any(sign in text for sign in _SIGNS):  # most have no such part, and parsing takes time
            return
        pending, growth = [json.loads(text)["normalizer"]], 1
    except (KeyError, RecursionError, TypeError, ValueError):
        return  # the library says what is wrong
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        inner, table = part.get("normalizers"), part.get("precompiled_charsmap")
        pending += inner if isinstance(inner, list) else []
        growth *= max(1, len(str(part.get("content") or "")))
        content = base64.b64decode(table) if isinstance(table, str) else bytes(4)
        if int.from_bytes(content[:4], "little") > len(content) - 4:  # its first part, in bytes
            raise CorruptError(f"reading {file}: precompiled_charsmap is cut; download or save it again")
    if growth > _GROWTH:
        raise CorruptError(f"reading {file}: its normalizer makes texts {growth:,} times as long")


def _byte_level(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    space = bool(settings.get("add_prefix_space", False))
    wrapper = ByteLevelBPETokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), add_prefix_space=space
    )
    backend: tokenizers.Tokenizer = wrapper._tokenizer
    backend.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>", AddedToken("<mask>", lstrip=True)])
    sep, cls = ((token, backend.token_to_id(token) or 0) for token in ("</s>", "<s>"))
    backend.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=space)
    return backend


def _from_transformers(folder: Path) -> tokenizers.Tokenizer:
    patterns = ("tokenizer_config.json", "vocab*", "*.model")
    if not any(True for pattern in patterns for _ in folder.glob(pattern)):
        raise StorageError(
            f"loading the tokenizer of {folder}: found neither tokenizer.json nor a vocabulary"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever goes wrong inside transformers
        raise ConfigError(f"loading the tokenizer of {folder} through transformers: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"loading the tokenizer of {folder}: {type(tokenizer).__name__} is not made with the tokenizers "
            "library; convert it to tokenizer.json"
        )
    return backend


def token_text(token: Any) -> Any:
    """Return the text of a token, which tokenizer_config.json may give with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty dict if the file does not exist."""
    return read_json(path) if path.is_file() else {}
