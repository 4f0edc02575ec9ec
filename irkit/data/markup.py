"""The markup of TREC: topics (``<top>``) and documents (``<DOC>``), as loose as its files are."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from irkit.errors import BadValueError

__all__ = ["LONGEST", "check_length", "is_markup", "read_markup"]

LONGEST = 1 << 28  # bytes of a line, or of a document

_START = re.compile(rb"(?=<(?:top|doc)(?:\s[^>]*)?>)", re.IGNORECASE)
_TAG = re.compile(r"<[/!]?[a-z][^<>]*>|<!--.*?-->", re.IGNORECASE | re.DOTALL)
_FIELD = re.compile(r"<(/?\w+)[^<>]*>")  # of topics, which seldom end
_LABEL = re.compile(r"\s*(?:number|topic|description|narrative)\s*:", re.IGNORECASE)
_NUMBER = re.compile(r"<docno>\s*([^\s<]+)", re.IGNORECASE)
_ABOUT = r"docno|docid|docoldno|dochdr|script|style"  # no part of the text
_TITLES = r"title|headline|hl|head|ttl|ti"  # of the collections that TREC has used


def check_length(where: str, size: int) -> None:
    """Refuse a line or a document of more than 256 MB; what decompresses to one need not be large.

    Raises:
        BadValueError: It is longer; the message starts with ``where``.
    """
    if size > LONGEST:
        raise BadValueError(
            f"{where}: more than {LONGEST >> 20} MB without an end; expected a record a line; is the file in "
            "another format?"
        )


def is_markup(line: bytes) -> bool:
    """Whether the first line of a file is one of a file of topics or documents."""
    return _START.match(line.lstrip()) is not None


def read_markup(path: str, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read topics or documents, in UTF-8 or else Latin-1.

    Args:
        path: For messages.
        lines: Line numbers and lines.

    Returns:
        Pairs of the line that one starts at, and its record. The text of a topic is its title, and each of
        its fields (``title``, ``desc``, ``narr``, ...) is there too; zeros before its number are dropped. The
        text of a document is what its ``<TEXT>`` holds, or all of it where there is none.

    Raises:
        BadValueError: One has no number, or more than 256 MB; the message names file and line.
    """
    part: list[bytes] = []
    start = size = 0
    for number, line in lines:
        for piece in filter(bytes.strip, _START.split(line)):
            if _START.match(piece):
                if part:
                    yield start, _record(b"\n".join(part), f"{path}:{start}")
                part, start, size = [], number, 0
            part.append(piece)
            size += len(piece)
            check_length(f"{path}:{start}", size)
    if part:
        yield start, _record(b"\n".join(part), f"{path}:{start}")


def _record(content: bytes, where: str) -> dict[str, Any]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    topic = text[:4].lower() == "<top"
    record = _topic(text) if topic else _document(text)
    if not record["id"]:
        raise BadValueError(f"{where}: expected {'<num>' if topic else '<DOCNO>'} and a number behind it")
    return record


def _topic(text: str) -> dict[str, Any]:
    _, *parts = _FIELD.split(text)
    fields: dict[str, Any] = {}
    for tag, content in zip(parts[::2], parts[1::2], strict=True):
        fields.setdefault(tag.lower(), _plain(_LABEL.sub("", content, count=1)))
    fields = {name: value for name, value in fields.items() if value and name[0] != "/"}
    number = str(fields.pop("num", ""))
    number = str(int(number)) if number.isdecimal() else number  # as judgments name it
    return fields | {"id": number} | ({"text": fields["title"]} if "title" in fields else {})


def _document(text: str) -> dict[str, Any]:
    number, texts = _NUMBER.search(text), _elements("text", text)
    title = " ".join(_elements(_TITLES, re.split("(?i)<text>", text)[0]))
    rest = re.sub(rf"(?is)<({_ABOUT}|{_TITLES})\b[^>]*>.*?</\1\s*>", " ", text)
    return {
        "id": number[1] if number else "",
        "title": _plain(title),
        "text": _plain(" ".join(texts) if texts else rest),
    }


def _elements(names: str, text: str) -> list[str]:
    return [match[2] for match in re.finditer(rf"(?is)<({names})\b[^>]*>(.*?)(?:</\1\s*>|\Z)", text)]


def _plain(text: str) -> str:
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())
