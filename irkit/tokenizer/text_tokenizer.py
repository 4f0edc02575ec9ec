"""The tokenizer: it turns texts into token ids, adds the model's special tokens, and cuts long texts."""

from __future__ import annotations

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
from tokenizers import AddedToken, normalizers

from irkit.arguments import brief
from irkit.core.ragged import Ragged
from irkit.errors import BadTypeError, BadValueError, CorruptError, reraise_as
from irkit.tokenizer.tokenizer_files import (
    given_length,
    read_backend,
    read_optional,
    sentence_settings,
    token_text,
)

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
_NO_LIMIT = 10**30  # how transformers writes that texts are never cut
_LENGTH_UNKNOWN = 10**9  # tokenizer_config.json says 1e30 where its author set no limit


class TokenSpan(NamedTuple):
    """The string of a token and the characters ``text[start:end]`` that the token covers.

    Tokens of a prompt and special tokens cover no characters: ``start`` equals ``end``.
    """

    token: str
    start: int
    end: int


class Tokenizer:
    """Turns texts into token ids: adds special tokens and cuts texts to a length, but never pads.

    Attributes:
        backend: The `tokenizers.Tokenizer` that splits texts and looks up ids.
        special_ids: Ids of the special tokens in the vocabulary, by role: cls, sep, mask, pad, unk.
        end_id: Id of ``eos_token``, with which texts of decoders end; None without such a token.
        do_lower_case: Whether texts are lower-cased first (a setting of sentence-transformers).

    Examples:
        >>> tokenizer = Tokenizer.from_pretrained(minilm)  # doctest: +SKIP
        >>> list(tokenizer(["Hello world"]))  # doctest: +SKIP
        [tensor([ 101, 7592, 2088,  102])]
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: Path, settings: Mapping[str, Any]) -> None:
        """Make a tokenizer around ``backend``, in place.

        Args:
            backend: Tokenizer of the library tokenizers.
            source: Directory that the backend was loaded from, whose files `save` copies.
            settings: Content of tokenizer_config.json.
        """
        self.backend = backend
        self.source = source
        self.do_lower_case = False
        self.special_ids: dict[str, int] = {}
        for role, usual in _USUAL.items():
            token = token_text(settings.get(f"{role}_token"))
            if ids := self.ids([token] if token else usual):
                self.special_ids[role] = ids[0]
        end = token_text(settings.get("eos_token"))
        self.end_id = next(iter(self.ids([end] if end else ())), None)
        self._side = settings.get("truncation_side", "right")
        self._cut: dict[int, tokenizers.Tokenizer] = {}  # copies of the backend for other lengths
        self._has_markers = False
        self._is_moved = False
        backend.no_padding()
        backend.no_truncation()

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Tokenizer:
        """Load the tokenizer of a model directory.

        `max_length` is found as in sentence-transformers: `given_length` of sentence_bert_config.json, else
        the lesser of ``model_max_length`` (tokenizer_config.json) and ``max_position_embeddings``
        (config.json).

        Args:
            directory: Directory with tokenizer.json, or vocab.txt (BERT), or vocab.json and merges.txt
                (RoBERTa), or files from which transformers makes a tokenizer.

        Raises:
            StorageError: The directory has no tokenizer.
            CorruptError: The files of the tokenizer are damaged.
        """
        folder = Path(directory)
        with reraise_as(CorruptError, f"loading the tokenizer of {folder}", _ADVICE):
            roles, config = (folder / name for name in ("special_tokens_map.json", "tokenizer_config.json"))
            settings, own = read_optional(roles) | read_optional(config), sentence_settings(folder)
            tokenizer = cls(read_backend(folder, settings), folder, settings)
            if own.get("do_lower_case"):
                tokenizer.do_lower_case = True
                normalizer = tokenizer.backend.normalizer
                parts = [normalizers.Lowercase(), *([] if normalizer is None else [normalizer])]
                tokenizer.backend.normalizer = normalizers.Sequence(parts)
            limits = [given_length(own)]
            if limits == [None]:
                positions = read_optional(folder / "config.json").get("max_position_embeddings")
                limits = [settings.get("model_max_length"), positions]
            known = [int(limit) for limit in limits if limit is not None and 0 < limit < _LENGTH_UNKNOWN]
            tokenizer.max_length = min(known, default=None)
            return tokenizer

    @property
    def max_length(self) -> int | None:
        """Number of tokens at which texts are cut, special tokens included; None if texts are never cut."""
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
        """Check that ``length`` is None, or a whole number of tokens that leaves room for text.

        ``name`` is the name of the setting, for messages.

        Raises:
            BadTypeError: ``length`` is not an integer.
            BadValueError: ``length`` leaves no room beside the special tokens.
        """
        if length is not None and (isinstance(length, bool) or not isinstance(length, int | np.integer)):
            raise BadTypeError(f"Tokenizer: {name} is {brief(length)}; expected a whole number of tokens")
        special = self.backend.num_special_tokens_to_add(False)
        if length is not None and length <= special:
            raise BadValueError(f"Tokenizer: {name} {length} leaves no room beside {special} special tokens")

    def highest_id(self) -> int:
        """Return the highest id that a text can get, added tokens included; -1 for an empty vocabulary.

        Raises:
            CorruptError: The tokenizer does not work.
        """
        with reraise_as(CorruptError, f"loading the tokenizer of {self.source}", _ADVICE):
            added = self.backend.encode("").ids
            return max(chain(added, self.backend.get_vocab().values()), default=-1)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size())

    def __call__(self, texts: Iterable[str], prompt: str = "", max_length: int | None = None) -> Ragged:
        """Convert texts to token ids.

        Args:
            texts: Strings. A lone half of a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD.
            prompt: Written before each text.
            max_length: Number of tokens at which texts are cut; None is the `max_length` of the tokenizer.

        Returns:
            Ragged int64 ``(total,)``, one row per text.

        Raises:
            BadTypeError: Something is not a string.
            BadValueError: ``max_length`` leaves no room beside the special tokens, or the tokenizer fails.
        """
        inputs = [prompt + text for text in strings(texts)]
        backend = self._backend(max_length)
        with reraise_as(BadValueError, "tokenizing", _ADVICE):
            try:
                encodings = backend.encode_batch_fast(inputs)
            except TypeError:  # a lone surrogate
                encodings = backend.encode_batch_fast([well_formed(text) for text in inputs])
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        values = np.fromiter(ids, np.int64, int(lengths.sum()))
        return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))

    def token_spans(self, text: str, prompt: str = "", max_length: int | None = None) -> list[TokenSpan]:
        """Return a `TokenSpan` for each token of one text, prompt and special tokens included.

        For the arguments see `__call__`.
        """
        backend, skipped = self._backend(max_length), len(prompt)
        with reraise_as(BadValueError, "tokenizing", _ADVICE):
            encoding = backend.encode(well_formed(prompt + text))
            spans = [
                [min(max(0, position - skipped), len(text)) for position in offsets]
                for offsets in encoding.offsets
            ]
            return [TokenSpan(token, *span) for token, span in zip(encoding.tokens, spans, strict=True)]

    def offsets(self, texts: Iterable[str]) -> list[Any]:
        """Return where the tokens of each whole text start and end in it, without special tokens.

        Returns:
            An array ``(n, 2)`` of int64 for each text; tokens that stand for no characters are left out.

        Raises:
            BadTypeError: Something is not a string.
            BadValueError: The tokenizer fails.
        """
        backend = self._backend(_LENGTH_UNKNOWN)
        with reraise_as(BadValueError, "tokenizing", _ADVICE):
            encodings = backend.encode_batch([*map(well_formed, strings(texts))], add_special_tokens=False)
        spans = [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings]
        return [part[part[:, 0] < part[:, 1]] for part in spans]

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the ids of the words that are tokens of the vocabulary; other words are left out."""
        ids = (self.backend.token_to_id(well_formed(word)) for word in words)
        return [token_id for token_id in ids if token_id is not None]

    def tokens(self, count: int) -> list[str]:
        """Return the tokens of the ids 0 to ``count - 1``; ``[id]`` for an id without a token."""
        tokens = map(self.backend.id_to_token, range(count))
        return [f"[{number}]" if token is None else token for number, token in enumerate(tokens)]

    def special_tokens(self) -> list[int]:
        """Return the ids of all special tokens, ascending: `special_ids`, and tokens added as special."""
        added = self.backend.get_added_tokens_decoder()
        return sorted({*self.special_ids.values(), *(key for key, token in added.items() if token.special)})

    def add_marker(self, marker: str, *, new: bool = True) -> None:
        """Make ``marker`` one special token wherever it occurs in a text, in place.

        If the vocabulary has the marker only without outer spaces (``"[unused0]"`` for ``"[unused0] "``),
        this token is used.

        Args:
            marker: Text of the marker.
            new: Whether a marker that is not in the vocabulary gets a new id, for which the encoder has to
                grow. If False, such a marker stays plain text.

        Raises:
            CorruptError: The vocabulary has gaps, and the new id is that of another token.
        """
        known = [name for name in (marker, marker.strip()) if self.ids([name])]
        token = known[0] if known else marker if new else ""
        if token and self.backend.encode(token, add_special_tokens=False).tokens != [token]:
            highest = self.highest_id()
            self.backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            if not known and self.ids([token])[0] <= highest:
                raise CorruptError(
                    f"adding the token {token!r} to {self.source}: it gets the id of another one, because "
                    "ids of the vocabulary have gaps; remove lines that come twice, or take a known token"
                )
            self._cut.clear()
            self._has_markers = True

    def lowercase(self) -> None:
        """Read all texts in lower case from now on, in place; the vocabulary stays."""
        own = [] if self.backend.normalizer is None else [self.backend.normalizer]
        self.backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        self._cut.clear()
        self.move()  # files of the tokenizer do not say so

    def without_special_tokens(self) -> Tokenizer:
        """Return a copy that adds no special tokens, so that more tokens of a text fit.

        Saving the copy writes its state from memory, because no files describe the copy.
        """
        twin = copy.copy(self)
        twin.backend, twin._cut, twin._is_moved = copy.deepcopy(self.backend), {}, True
        twin.backend.post_processor = None
        return twin

    def prompt_length(self, prompt: str) -> int:
        """Return the number of tokens of ``prompt`` and of the special tokens before it."""
        if not prompt:
            return 0
        ids = self([prompt]).values.tolist()
        added = self.backend.get_added_tokens_decoder()
        return len(ids) - int(bool(ids) and ids[-1] in added and added[ids[-1]].special)

    @property
    def signature(self) -> str:
        """Text that differs between tokenizers: vocabulary size, special ids and ids of a test sentence."""
        backend, text = self.backend, _PROBE
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        ids = [token.id for word in words for token in backend.model.tokenize(word)]
        return f"{self.vocab_size} {self.special_ids} {ids}"

    def move(self) -> None:
        """Mark the tokenizer as moved to an encoder of another family.

        From then on, `save` writes the tokenizer from memory, because the files that it was loaded from
        belong to the old family.
        """
        self._is_moved = True

    def save(self, directory: str | Path) -> None:
        """Write the files of the tokenizer to ``directory``.

        The files that the tokenizer was loaded from are copied. tokenizer.json is written from memory if it
        is missing or markers were added. After `move`, everything is written from memory.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        copied = () if self._is_moved else _COPIED
        for file in chain.from_iterable(self.source.glob(pattern) for pattern in copied):
            shutil.copyfile(file, folder / file.name)
        if self._is_moved:
            ids = self.special_ids if self.end_id is None else {**self.special_ids, "eos": self.end_id}
            names = {f"{role}_token": self.backend.id_to_token(id) for role, id in ids.items()}
            limit = _NO_LIMIT if self.max_length is None else self.max_length
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": limit, **names}
            settings["truncation_side"] = self._side
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if self._is_moved or self._has_markers or not (folder / "tokenizer.json").exists():
            state = json.loads(self.backend.to_str()) | {"truncation": None}
            (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")

    def _backend(self, max_length: int | None) -> tokenizers.Tokenizer:
        """Return a backend that cuts texts at ``max_length`` tokens; None is the length of the tokenizer.

        The backend is a copy, kept for each length: the length is a state of a backend, and threads share
        backends.
        """
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
    """Yield the texts one by one, and check that each is a string.

    Raises:
        BadTypeError: An item is not a string, or ``texts`` is one string or not iterable.
    """
    if isinstance(texts, str | Mapping) or not isinstance(texts, Iterable):
        what = "one string; write [text]" if isinstance(texts, str) else f"{type(texts).__name__}"
        raise BadTypeError(f"tokenizing: expected several strings, got {what}")
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadTypeError(f"tokenizing: text {position} is {type(text).__name__}, expected a string")
        yield text


def well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of each lone half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
