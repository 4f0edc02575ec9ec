"""Texts to token ids, straight from the files of a model directory."""

from __future__ import annotations

import base64
import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, normalizers, processors
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from irkit.arguments import shown
from irkit.config import read_json
from irkit.errors import BadTypeError, BadValueError, ConfigError, CorruptError, StorageError, told_as
from irkit.ragged import Ragged

__all__ = ["Piece", "Tokenizer", "sentence_settings", "strings", "well_formed"]

_USUAL = {  # role: what BERT calls it, what RoBERTa calls it
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
}
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",  # sentencepiece
)
_PROBE = "Éléphants & naïve façades: 3,141 tokenizers' #hash-tags, 日本語, Ωmega, emoji 🙂, unaffableness"
_ADVICE = "its files may be damaged; download or save them again"
_GROWTH = 4096  # times as long as it was may a normalizer make a text
_SIGNS = ("precompiled_charsmap", '"String"', '"Regex"', "\\u")  # of parts that can ask for memory
_LENGTH_UNKNOWN = 10**9  # tokenizer_config.json says 1e30 where its author set no limit


class Piece(NamedTuple):
    """A token and the characters ``text[start:end]`` it stands for; none if it was added to the text."""

    token: str
    start: int
    end: int


class Tokenizer:
    """Text to ids as the model was trained on them: special tokens added, cut to a length, never padded.

    Attributes:
        backend: The `tokenizers.Tokenizer` that does the work.
        special_ids: Ids of the special tokens the vocabulary has, by role: cls, sep, mask, pad, unk.
        do_lower_case: Texts are lower-cased first (a setting of sentence-transformers).

    Examples:
        >>> tokenizer = Tokenizer.from_pretrained(minilm)  # doctest: +SKIP
        >>> list(tokenizer(["Hello world"]))  # doctest: +SKIP
        [tensor([ 101, 7592, 2088,  102])]
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: Path, settings: Mapping[str, Any]) -> None:
        """Wrap ``backend``, which comes from the directory ``source`` with this tokenizer_config.json."""
        self.backend = backend
        self.source = source
        self.do_lower_case = False
        self.special_ids: dict[str, int] = {}
        for role, usual in _USUAL.items():
            given = settings.get(f"{role}_token")
            given = given.get("content") if isinstance(given, dict) else given
            ids = map(backend.token_to_id, [given] if given else usual)
            if (number := next((number for number in ids if number is not None), None)) is not None:
                self.special_ids[role] = number
        self._side = settings.get("truncation_side", "right")
        self._cut: dict[int, tokenizers.Tokenizer] = {}  # copies of the backend for other lengths
        self._has_markers = False
        self._is_moved = False
        backend.no_padding()
        backend.no_truncation()

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Tokenizer:
        """Load the tokenizer of a model directory.

        The longest length is decided as sentence-transformers does: ``max_seq_length`` of its own
        settings, else the lesser of ``model_max_length`` (tokenizer_config.json) and
        ``max_position_embeddings`` (config.json).

        Args:
            directory: Holds tokenizer.json, or vocab.txt (BERT), or vocab.json and merges.txt
                (RoBERTa), or files of which transformers makes a tokenizer.

        Raises:
            StorageError: There is no tokenizer.
            CorruptError: Its files are damaged.
        """
        folder = Path(directory)
        with told_as(CorruptError, f"loading the tokenizer of {folder}", _ADVICE):
            return cls._load(folder)

    @classmethod
    def _load(cls, folder: Path) -> Tokenizer:
        settings = _optional(folder / "special_tokens_map.json") | _optional(folder / "tokenizer_config.json")
        own = sentence_settings(folder)
        tokenizer = cls(_read(folder, settings), folder, settings)
        if own.get("do_lower_case"):
            tokenizer.do_lower_case = True
            parts = [normalizers.Lowercase(), tokenizer.backend.normalizer]
            tokenizer.backend.normalizer = normalizers.Sequence([part for part in parts if part is not None])
        limits = [own.get("max_seq_length")]
        if limits == [None]:
            limits = [
                settings.get("model_max_length"),
                _optional(folder / "config.json").get("max_position_embeddings"),
            ]
        known = [int(limit) for limit in limits if limit is not None and 0 < limit < _LENGTH_UNKNOWN]
        tokenizer.max_length = min(known, default=None)
        return tokenizer

    @property
    def max_length(self) -> int | None:
        """Tokens at which a text is cut, special tokens included; None is nowhere."""
        truncation = self.backend.truncation
        return None if truncation is None else int(truncation["max_length"])

    @max_length.setter
    def max_length(self, length: int | None) -> None:
        self.check_length(length)
        if length is None:
            self.backend.no_truncation()
        else:
            self.backend.enable_truncation(length, direction=self._side)

    def check_length(self, length: int | None, name: str = "max_length") -> None:
        """Raise, about ``name``, if ``length`` is no number or leaves no room for anything of a text."""
        if length is not None and (isinstance(length, bool) or not isinstance(length, int | np.integer)):
            raise BadTypeError(f"Tokenizer: {name} is {shown(length)}; expected a whole number of tokens")
        special = self.backend.num_special_tokens_to_add(False)
        if length is not None and length <= special:
            raise BadValueError(f"Tokenizer: {name} {length} leaves no room beside {special} special tokens")

    def highest_id(self) -> int:
        """The highest id that a token of a text, or one that is added to it, can get; -1 if there is none.

        Raises:
            CorruptError: The tokenizer does not work.
        """
        with told_as(CorruptError, f"loading the tokenizer of {self.source}", _ADVICE):
            added = self.backend.encode("").ids
            return max(chain(added, self.backend.get_vocab().values()), default=-1)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size())

    def __call__(self, texts: Iterable[str], prompt: str = "", max_length: int | None = None) -> Ragged:
        """Turn texts into ids.

        Args:
            texts: Any strings; half of a surrogate pair, which no encoding can hold, becomes U+FFFD.
            prompt: Written before each text.
            max_length: Cut texts here and not at the `max_length` of the tokenizer.

        Returns:
            Ragged int64 ``(total,)``, a row a text.

        Raises:
            BadTypeError: Something is not a string.
            BadValueError: ``max_length`` leaves no room beside the special tokens, or the tokenizer fails.
        """
        inputs = [prompt + text for text in strings(texts)]
        backend = self._backend(max_length)
        with told_as(BadValueError, "tokenizing", _ADVICE):
            try:
                encodings = backend.encode_batch_fast(inputs)
            except TypeError:  # a lone surrogate
                encodings = backend.encode_batch_fast([well_formed(text) for text in inputs])
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        values = np.fromiter(ids, np.int64, int(lengths.sum()))
        return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))

    def pieces(self, text: str, prompt: str = "", max_length: int | None = None) -> list[Piece]:
        """The tokens that calling the tokenizer makes of one text, as strings with their places in it."""
        backend, skipped = self._backend(max_length), len(prompt)
        with told_as(BadValueError, "tokenizing", _ADVICE):
            encoding = backend.encode(well_formed(prompt + text))
            places = [
                [min(max(0, place - skipped), len(text)) for place in offsets] for offsets in encoding.offsets
            ]
            return [Piece(token, *place) for token, place in zip(encoding.tokens, places, strict=True)]

    def ids(self, words: Iterable[str]) -> list[int]:
        """Ids of those of ``words`` that are tokens as they stand."""
        found = map(self.backend.token_to_id, words)
        return [number for number in found if number is not None]

    def tokens(self, count: int) -> list[str]:
        """The tokens of the ids below ``count``; ``[id]`` for an id that has none."""
        found = map(self.backend.id_to_token, range(count))
        return [f"[{number}]" if token is None else token for number, token in enumerate(found)]

    def special_tokens(self) -> list[int]:
        """Ids of all special tokens: those with a role, and what was added as one."""
        added = self.backend.get_added_tokens_decoder()
        return sorted({*self.special_ids.values(), *(key for key, token in added.items() if token.special)})

    def add_marker(self, marker: str, *, new: bool = True) -> None:
        """Let ``marker`` be one token wherever a text holds it.

        A marker that ends in a space and is no token with it, such as ``"[unused0] "``, is the token
        without the space.

        Args:
            marker: A text.
            new: Give it an id if the vocabulary lacks it, for which the encoder has to grow; otherwise it
                stays the text that it is.
        """
        known = [name for name in (marker, marker.strip()) if self.ids([name])]
        token = known[0] if known else marker if new else ""
        if token and self.backend.encode(token, add_special_tokens=False).tokens != [token]:
            self.backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            self._cut.clear()
            self._has_markers = True

    def without_special_tokens(self) -> Tokenizer:
        """A copy that adds no special tokens to texts, which leaves room for as many tokens more."""
        twin = copy.copy(self)
        twin.backend, twin._cut = copy.deepcopy(self.backend), {}
        twin.backend.post_processor = None
        return twin

    def prompt_length(self, prompt: str) -> int:
        """Number of tokens that ``prompt`` and the special tokens before it make at the start of a text."""
        if not prompt:
            return 0
        ids = self([prompt]).values.tolist()
        added = self.backend.get_added_tokens_decoder()
        return len(ids) - int(bool(ids) and ids[-1] in added and added[ids[-1]].special)

    @property
    def signature(self) -> str:
        """Tells tokenizers apart: vocabulary size, special tokens and the ids of a tricky sentence."""
        backend, text = self.backend, _PROBE
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        ids = [token.id for word in words for token in backend.model.tokenize(word)]
        return f"{self.vocab_size} {self.special_ids} {ids}"

    def move(self) -> None:
        """Go with an encoder of any family: be saved with all that transformers would guess from its own.

        Files that belong to the family of the tokenizer are then not copied.
        """
        self._is_moved = True

    def save(self, directory: str | Path) -> None:
        """Write the files it was loaded from, and tokenizer.json if there was none or markers were added."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        copied = () if self._is_moved else _COPIED
        for file in chain.from_iterable(self.source.glob(pattern) for pattern in copied):
            shutil.copyfile(file, folder / file.name)
        if self._is_moved:
            names = {f"{role}_token": self.backend.id_to_token(id) for role, id in self.special_ids.items()}
            settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | names
            (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        if self._has_markers or not (folder / "tokenizer.json").exists():
            state = json.loads(self.backend.to_str()) | {"truncation": None}
            (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")

    def _backend(self, max_length: int | None) -> tokenizers.Tokenizer:
        """One that cuts there; a copy each, because the length is a state that threads would share."""
        if max_length is None or max_length == self.max_length:
            return self.backend
        if max_length not in self._cut:
            twin = Tokenizer(copy.deepcopy(self.backend), self.source, {"truncation_side": self._side})
            twin.max_length = max_length
            self._cut[max_length] = twin.backend
        return self._cut[max_length]

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, max_length {self.max_length}, {str(self.source)!r})"


def strings(texts: Iterable[str]) -> Iterator[str]:
    """The texts one by one, each of them checked.

    Raises:
        BadTypeError: Something is not a string, or ``texts`` is one string or no sequence at all.
    """
    if isinstance(texts, str | Mapping) or not isinstance(texts, Iterable):
        what = "one string; write [text]" if isinstance(texts, str) else f"{type(texts).__name__}"
        raise BadTypeError(f"tokenizing: expected several strings, got {what}")
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadTypeError(f"tokenizing: text {position} is {type(text).__name__}, expected a string")
        yield text


def well_formed(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def sentence_settings(directory: Path) -> dict[str, Any]:
    """What sentence-transformers keeps beside the encoder: sentence_bert_config.json, or its older names."""
    return next((read_json(file) for file in sorted(directory.glob("sentence_*_config.json"))), {})


def _read(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the backend from whichever files are there."""
    try:
        if (folder / "tokenizer.json").is_file():
            _check_normalizer(folder / "tokenizer.json")
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            if isinstance(backend.normalizer, normalizers.BertNormalizer):
                backend.normalizer = _bert_normalizer(backend.normalizer, settings)
            return backend
        if _has_line(folder / "vocab.txt", "[CLS]"):
            return _wordpiece(folder, settings)
        if (folder / "merges.txt").is_file() and "<s>" in _optional(folder / "vocab.json"):
            return _byte_level(folder, settings)
    except Exception as error:  # the library raises plain Exception for what it cannot parse
        raise CorruptError(f"loading the tokenizer of {folder}: {error}") from error
    return _from_transformers(folder)


def _check_normalizer(file: Path) -> None:
    """Refuse what asks for so much memory that the tokenizers library ends the process, as it does then."""
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


def _wordpiece(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    wrapper = BertWordPieceTokenizer(str(folder / "vocab.txt"))
    backend: tokenizers.Tokenizer = wrapper._tokenizer
    backend.normalizer = _bert_normalizer(backend.normalizer, settings)
    return backend


def _bert_normalizer(
    normalizer: normalizers.BertNormalizer, settings: Mapping[str, Any]
) -> normalizers.BertNormalizer:
    """tokenizer_config.json has the last word on these, as in transformers."""
    return normalizers.BertNormalizer(
        clean_text=normalizer.clean_text,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", normalizer.handle_chinese_chars),
        strip_accents=settings.get("strip_accents", normalizer.strip_accents),
        lowercase=settings.get("do_lower_case", normalizer.lowercase),
    )


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


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _has_line(path: Path, line: str) -> bool:
    return path.is_file() and line in path.read_text(encoding="utf-8").split("\n")
