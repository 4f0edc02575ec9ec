"""Which token of one vocabulary is which of another, whatever marks either uses for the start of a word."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import tokenizers
import torch
from torch import Tensor

from irkit.errors import ConfigError
from irkit.tokenizer import Tokenizer

__all__ = ["Alignment", "Form", "Spelling", "align"]

_SPACE = "▁"  # of SentencePiece
_AROUND = ("normalizer", "pre_tokenizer", "decoder")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece writes bytes it has no character for so


class Form(NamedTuple):
    """What a token stands for.

    Attributes:
        text: Its characters in UTF-8, without marks; byte-level tokens may hold half a character.
        starts: Whether a word starts with it.
    """

    text: bytes
    starts: bool


class Spelling:
    """How a tokenizer writes what its tokens stand for.

    Attributes:
        style: ``"wordpiece"`` (a prefix, ``##``, marks what continues a word), ``"bytes"`` (``Ġ`` marks what
            starts one, other bytes are characters too) or ``"spaces"`` (``▁`` marks what starts one).
        prefix: Of tokens that continue a word.

    Examples:
        >>> from tokenizers import Tokenizer as Backend, models
        >>> spelling = Spelling(Backend(models.WordPiece({"[UNK]": 0, "##ing": 1}, unk_token="[UNK]")))
        >>> spelling.form("##ing"), spelling.write(Form(b"ing", True))
        (Form(text=b'ing', starts=False), 'ing')
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Find out.

        Raises:
            ConfigError: It marks the ends of words, not their starts.
        """
        state = json.loads(backend.to_str())
        model, around = state["model"], json.dumps([state[key] for key in _AROUND], ensure_ascii=False)
        self.prefix = model.get("continuing_subword_prefix") or ""
        if model.get("end_of_word_suffix"):
            raise ConfigError(
                f"vocabulary transfer: a tokenizer that marks ends of words with "
                f"{model['end_of_word_suffix']!r}; expected one with marks at their starts, such as "
                "WordPiece, byte-level BPE or SentencePiece"
            )
        if model["type"] == "WordPiece" or self.prefix:
            self.style = "wordpiece"
        else:
            self.style = "bytes" if '"ByteLevel"' in around else "spaces" if _SPACE in around else "wordpiece"

    def form(self, token: str) -> Form:
        """What a token that was not added stands for."""
        if self.style == "wordpiece":
            inner = bool(self.prefix) and token.startswith(self.prefix) and token != self.prefix
            return Form(token.removeprefix(self.prefix if inner else "").encode(), not inner)
        if self.style == "bytes":
            text = b"".join(_BYTES[letter] if letter in _BYTES else letter.encode() for letter in token)
            starts = text.startswith(b" ") and text != b" "
            return Form(text[starts:], starts)
        if byte := _BYTE.fullmatch(token):
            return Form(bytes.fromhex(byte[1]), False)
        starts = token.startswith(_SPACE) and token != _SPACE
        return Form(token[starts:].replace(_SPACE, " ").encode(), starts)

    def write(self, form: Form) -> str:
        """How the tokenizer would write a token of this form; the inverse of `form`."""
        if self.style == "bytes":
            return "".join(_LETTERS[byte] for byte in b" " * form.starts + form.text)
        text = form.text.decode(errors="replace")
        if self.style == "spaces":
            return _SPACE * form.starts + text.replace(" ", _SPACE)
        return text if form.starts else self.prefix + text

    def alike(self, other: Spelling) -> bool:
        """Whether both write the same for each form."""
        return (self.style, self.prefix) == (other.style, other.prefix)

    def twins(self, form: Form, style: str) -> tuple[Form, ...]:
        """Forms that are as good as ``form`` of a tokenizer of that style, the best first.

        What tokenizers cut off the word before it - punctuation, symbols, Chinese characters - is written
        without a space rather than with one; of a tokenizer of the same style, as it stands.
        """
        if not _stands_alone(form.text):
            return (form,)
        first = form if style == self.style else Form(form.text, self.style == "wordpiece")
        return (first, first._replace(starts=not first.starts))


@dataclass(frozen=True)
class Alignment:
    """The tokens of a target vocabulary and those of a source they correspond to.

    Attributes:
        tokens: ``V'`` tokens of the target, by id; None for an id that has none.
        source_ids: ``(V',)`` int64, id of the corresponding token of the source, or -1.
        rules: ``V'`` names of the rule by which each was found, see `align`.
        special: ``(V',)`` bool, special tokens of the target.
        source_size: ``V``.
    """

    tokens: tuple[str | None, ...]
    source_ids: Tensor
    rules: tuple[str, ...]
    special: Tensor
    source_size: int

    @property
    def is_new(self) -> Tensor:
        """``(V',)`` bool: tokens without a counterpart, N' of the paper."""
        return self.source_ids < 0

    @property
    def overlap(self) -> float:
        """Share of the target vocabulary with a counterpart, |O| / V'."""
        return 1.0 - float(self.is_new.double().mean())

    def counts(self) -> dict[str, int]:
        """Number of tokens by rule."""
        return dict(Counter(self.rules).most_common())


def align(source: Tokenizer, target: Tokenizer, *, normalize: bool = False) -> Alignment:
    """Find the tokens that two vocabularies share.

    The first rule that finds something counts:

    1. ``role``: special tokens correspond by what they are for: ``[CLS]`` is ``<s>``, ``[MASK]`` is
       ``<mask>``.
    2. ``special``: tokens that were added to either vocabulary, by how they are written.
    3. ``text``: equal texts, in the same place: what starts a word (``play``, ``Ġplay``, ``▁play``) is not
       what continues one (``##play``, ``play``, ``play``). For punctuation, symbols and Chinese characters
       the place does not count. Case and accents do: ``Paris`` is not ``paris``. Of several with the text,
       such as ``A`` and ``<0x41>``, it is the one that is written as the target writes it, or the last.
    4. ``normalized``, only if asked for: the text that the normaliser of the target makes of the one in the
       source (``Paris`` then is ``paris``); of several the one with the lowest id, the most frequent.

    A token of the source can correspond to several of the target.

    Args:
        source: Of the model that is transferred.
        target: What it is transferred onto.
        normalize: Whether the last rule is used. The overlaps of the paper are without it.

    Raises:
        ConfigError: A tokenizer marks the ends of words.

    Source: "Bridging Vocabulary Gaps", section 4.2.2, which names O and N' but no rules. These give 57.0 %
    for ModernBERT onto bert-base-uncased, 59.7 % for RoBERTa and 60.9 % for bert-base-cased; the paper has
    56.4, 59.6 and 60.9.
    """
    ours, theirs = source.backend.get_vocab(True), target.backend.get_vocab(True)
    own, added = _added(source), _added(source) | _added(target)
    ours_spelled, theirs_spelled = Spelling(source.backend), Spelling(target.backend)
    plain = {token: number for token, number in sorted(ours.items(), key=_number) if token not in own}
    forms = {ours_spelled.form(token): number for token, number in plain.items()}
    same = plain if ours_spelled.alike(theirs_spelled) else {}
    folded = _normalized(forms, target) if normalize else {}
    roles = {
        number: source.special_ids[role]
        for role, number in target.special_ids.items()
        if role in source.special_ids
    }
    size = 1 + max(theirs.values(), default=-1)
    tokens: list[str | None] = [None] * size
    ids, rules = [-1] * size, ["new"] * size
    for token, number in theirs.items():
        tokens[number] = token
        twins = ours_spelled.twins(theirs_spelled.form(token), theirs_spelled.style)
        found: dict[str, int | None] = {
            "role": roles.get(number),
            "special": ours.get(token) if token in added else None,
            "text": None if token in added else same.get(token, _first(forms, twins)),
            "normalized": None if token in added else _first(folded, twins),
        }
        rules[number] = next((rule for rule in found if found[rule] is not None), "new")
        ids[number] = next((each for each in found.values() if each is not None), -1)
    special = torch.zeros(size, dtype=torch.bool)
    special[target.special_tokens()] = True
    return Alignment(
        tuple(tokens), torch.tensor(ids), tuple(rules), special, 1 + max(ours.values(), default=-1)
    )


def _normalized(forms: Mapping[Form, int], target: Tokenizer) -> dict[Form, int]:
    """Forms as the normaliser of the target writes them, with the lowest id that each has."""
    normalizer = target.backend.normalizer
    found: dict[Form, int] = {}
    for form, number in sorted(forms.items(), key=_number):
        text = form.text.decode(errors="replace")
        text = text if normalizer is None else normalizer.normalize_str(text)
        found.setdefault(Form(text.strip().removeprefix(_SPACE).encode(), form.starts), number)
    return found


def _number(item: tuple[Any, int]) -> int:
    return item[1]


def _first(known: Mapping[Form, int], forms: Iterable[Form]) -> int | None:
    return next((known[form] for form in forms if form in known), None)


def _added(tokenizer: Tokenizer) -> set[str]:
    return {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}


def _stands_alone(text: bytes) -> bool:
    try:
        letters = text.decode()
    except UnicodeDecodeError:
        return False
    return bool(letters) and all(
        unicodedata.category(letter)[0] in "PS" or "\u3400" <= letter <= "\u9fff" for letter in letters
    )


def _byte_letters() -> dict[int, str]:
    """The letter that byte-level BPE writes for each byte: itself if it can be seen, else one from U+0100."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_LETTERS = _byte_letters()
_BYTES = {letter: bytes([byte]) for byte, letter in _LETTERS.items()}
