"""Align two vocabularies: which tokens are the same, although tokenizers mark word starts differently."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import tokenizers
import torch
from torch import Tensor

from irkit.errors import ConfigError
from irkit.tokenizer import Tokenizer

_SPACE = "▁"  # SentencePiece's space
_AROUND = ("normalizer", "pre_tokenizer", "decoder")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte


class Form(NamedTuple):
    """What a token stands for, however a tokenizer spells it.

    Attributes:
        text: Characters in UTF-8 without marks; a byte-level token may hold half a character.
        starts: Whether the token starts a word.
    """

    text: bytes
    starts: bool


class Spelling:
    """How a tokenizer spells a token, given its form: its bytes and whether it starts a word (`Form`).

    Attributes:
        style: ``"wordpiece"``: a prefix, ``##``, marks tokens that continue a word; ``"bytes"``: ``Ġ`` marks
            tokens that start a word, and every byte is written as a character; ``"spaces"``: ``▁`` marks
            tokens that start a word.
        prefix: Prefix of tokens that continue a word.

    Examples:
        >>> from tokenizers import Tokenizer as Backend, models
        >>> spelling = Spelling(Backend(models.WordPiece({"[UNK]": 0, "##ing": 1}, unk_token="[UNK]")))
        >>> spelling.form("##ing"), spelling.write(Form(b"ing", True))
        (Form(text=b'ing', starts=False), 'ing')
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Read the style from the settings of a tokenizer.

        Raises:
            ConfigError: The tokenizer marks the ends of words, not their starts.
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
        """Return the form of a token of the trained vocabulary, not of an added token."""
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
        """Return the token of a form; the inverse of `form`."""
        if self.style == "bytes":
            return "".join(_LETTERS[byte] for byte in b" " * form.starts + form.text)
        text = form.text.decode(errors="replace")
        if self.style == "spaces":
            return _SPACE * form.starts + text.replace(" ", _SPACE)
        return text if form.starts else self.prefix + text

    def alike(self, other: Spelling) -> bool:
        """Return True if this and the other tokenizer spell every form the same way."""
        return (self.style, self.prefix) == (other.style, other.prefix)

    def twins(self, form: Form, style: str) -> tuple[Form, ...]:
        """Return the forms of this tokenizer that match a form of another tokenizer, the best first.

        For words this is ``form`` alone. Tokenizers split punctuation, symbols and Chinese characters off the
        word before, so such characters match with and without a word start. If the style is the same,
        ``form`` itself comes first. Otherwise the form without a space in front comes first.

        Args:
            form: A form of the other tokenizer.
            style: Style of the other tokenizer.
        """
        if not _stands_alone(form.text):
            return (form,)
        first = form if style == self.style else Form(form.text, self.style == "wordpiece")
        return (first, first._replace(starts=not first.starts))


@dataclass(frozen=True)
class Alignment:
    """The tokens of a target vocabulary and the corresponding tokens of a source.

    Attributes:
        tokens: ``V'`` tokens of the target by id; None for an id without a token.
        source_ids: ``(V',)`` int64, id of the corresponding token of the source, or -1.
        rules: ``V'`` names of the rules that matched, see `align`.
        special: ``(V',)`` bool, special tokens of the target.
        source_size: ``V``, the size of the source vocabulary.
    """

    tokens: tuple[str | None, ...]
    source_ids: Tensor
    rules: tuple[str, ...]
    special: Tensor
    source_size: int

    @property
    def is_new(self) -> Tensor:
        """Which tokens have no counterpart, ``(V',)`` bool: N' of the paper."""
        return self.source_ids < 0

    @property
    def overlap(self) -> float:
        """Share of the target vocabulary with a counterpart, |O| / V'."""
        return 1.0 - float(self.is_new.double().mean())

    def counts(self) -> dict[str, int]:
        """Return the number of tokens by rule."""
        return dict(Counter(self.rules).most_common())


def align(source: Tokenizer, target: Tokenizer, *, normalize: bool = False) -> Alignment:
    """Find the tokens that two vocabularies share.

    The first rule that matches counts:

    1. ``role``: special tokens with the same role match: ``[CLS]`` and ``<s>``, ``[MASK]`` and ``<mask>``.
    2. ``special``: tokens that were added to either vocabulary match if they are written alike.
    3. ``text``: tokens match if they have the same text at the same position of a word. Tokens that start
       a word (``play``, ``Ġplay``, ``▁play``) do not match tokens that continue one (``##play``, ``play``,
       ``play``). For punctuation, symbols and Chinese characters the position does not count. Case and
       accents do: ``Paris`` is not ``paris``. If several tokens have the text, such as ``A`` and ``<0x41>``,
       the one that is written like in the target matches, or else the last one.
    4. ``normalized``, only with ``normalize``: the texts are equal after the normaliser of the target
       (``Paris`` is ``paris``). If several match, the one with the lowest id counts, which is the most
       frequent.

    A token of the source can match several tokens of the target.

    Args:
        source: Tokenizer of the model that is transferred.
        target: Tokenizer of the new vocabulary.
        normalize: Apply the last rule. The overlaps in the paper were computed without this rule.

    Raises:
        ConfigError: A tokenizer marks the ends of words.

    Source: "Bridging Vocabulary Gaps", section 4.2.2, which defines O and N' but no rules. These rules give
    an overlap of 57.0 % for ModernBERT and bert-base-uncased, 59.7 % for RoBERTa and 60.9 % for
    bert-base-cased; the paper has 56.4, 59.6 and 60.9.
    """
    # the tokens of the source by text, by form, by normalised form and by role
    ours, theirs = source.backend.get_vocab(True), target.backend.get_vocab(True)
    own, added = _added(source), _added(source) | _added(target)
    ours_spelled, theirs_spelled = Spelling(source.backend), Spelling(target.backend)
    plain = {token: number for token, number in sorted(ours.items(), key=itemgetter(1)) if token not in own}
    forms = {ours_spelled.form(token): number for token, number in plain.items()}
    same = plain if ours_spelled.alike(theirs_spelled) else {}
    folded = _normalized(forms, target) if normalize else {}
    roles = {
        number: source.special_ids[role]
        for role, number in target.special_ids.items()
        if role in source.special_ids
    }
    # each token of the target by the first rule that matches
    size = 1 + max(theirs.values(), default=-1)
    tokens: list[str | None] = [None] * size
    ids, rules = [-1] * size, ["new"] * size
    for token, number in theirs.items():
        tokens[number] = token
        twins = ours_spelled.twins(theirs_spelled.form(token), theirs_spelled.style)
        matches: dict[str, int | None] = {
            "role": roles.get(number),
            "special": ours.get(token) if token in added else None,
            "text": None if token in added else same.get(token, _first(forms, twins)),
            "normalized": None if token in added else _first(folded, twins),
        }
        rules[number] = next((rule for rule in matches if matches[rule] is not None), "new")
        ids[number] = next((match for match in matches.values() if match is not None), -1)
    special = torch.zeros(size, dtype=torch.bool)
    special[target.special_tokens()] = True
    return Alignment(
        tuple(tokens), torch.tensor(ids), tuple(rules), special, 1 + max(ours.values(), default=-1)
    )


def _normalized(forms: Mapping[Form, int], target: Tokenizer) -> dict[Form, int]:
    """Return the forms after the normaliser of the target, with the lowest id of each."""
    normalizer = target.backend.normalizer
    normalized: dict[Form, int] = {}
    for form, number in sorted(forms.items(), key=itemgetter(1)):
        text = form.text.decode(errors="replace")
        text = text if normalizer is None else normalizer.normalize_str(text)
        normalized.setdefault(Form(text.strip().removeprefix(_SPACE).encode(), form.starts), number)
    return normalized


def _first(known: Mapping[Form, int], forms: Iterable[Form]) -> int | None:
    """Return the id of the first of ``forms`` that is in ``known``; None if none is."""
    return next((known[form] for form in forms if form in known), None)


def _added(tokenizer: Tokenizer) -> set[str]:
    return {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}


def _stands_alone(text: bytes) -> bool:
    """Return True for punctuation, symbols and Chinese characters."""
    try:
        letters = text.decode()
    except UnicodeDecodeError:
        return False
    return bool(letters) and all(
        unicodedata.category(letter)[0] in "PS" or "\u3400" <= letter <= "\u9fff" for letter in letters
    )


def _byte_letters() -> dict[int, str]:
    """Return byte -> letter of byte-level BPE: the character itself if visible, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_LETTERS = _byte_letters()
_BYTES = {letter: bytes([byte]) for byte, letter in _LETTERS.items()}
