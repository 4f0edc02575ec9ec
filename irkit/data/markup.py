"""Read the markup of TREC: topics (``<top>``) and documents (``<DOC>``).

ir_datasets reads this markup for the collections of its catalogue only, and needs the extra ``data``. This
module reads any such file: the user's own test collections, and TREC's disks, which cannot be downloaded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from irkit.errors import BadValueError

LONGEST = 1 << 28  # bytes of a line, or of a document

_START = re.compile(rb"(?=<(?:top|doc)(?:\s[^>]*)?>)", re.IGNORECASE)
_TAG = re.compile(r"<[/!]?[a-z][^<>]*>|<!--.*?-->", re.IGNORECASE | re.DOTALL)
_FIELD = re.compile(r"<(/?\w+)[^<>]*>")  # a field of a topic, often without an end tag
_LABEL = re.compile(r"\s*(?:number|topic|description|narrative)\s*:", re.IGNORECASE)
_NUMBER = re.compile(r"<docno>\s*([^\s<]+)", re.IGNORECASE)
_NO_TEXT = r"docno|docid|docoldno|dochdr|script|style"
_TITLES = r"title|headline|hl|head|ttl|ti"  # in collections of TREC


def check_length(where: str, size: int, longest: int = LONGEST) -> None:
    """Check that a line or a document has at most ``longest`` bytes.

    Without a limit, a small compressed file could expand to more than the memory holds.

    Raises:
        BadValueError: ``size`` is above ``longest``; the message starts with ``where``.
    """
    if size > longest:
        raise BadValueError(
            f"{where}: more than {longest >> 20} MB without an end; expected a record a line; is the file in "
            "another format?"
        )


def is_markup(line: bytes) -> bool:
    """Return True if the first line of a file shows TREC topics or documents."""
    return _START.match(line.lstrip()) is not None


def read_markup(
    path: str, lines: Iterable[tuple[int, bytes]], longest: int = LONGEST
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read topics or documents, in UTF-8 or otherwise Latin-1.

    Args:
        path: Name of the file, for messages.
        lines: Line numbers and lines.
        longest: Maximum number of bytes of an item.

    Returns:
        Pairs of the number of the first line and a record. The record of a topic has all its fields
        (``title``, ``desc``, ``narr``, ...); its text is the title, and its id the number without leading
        zeros. The text of a document is the content of ``<TEXT>``, or the whole document without one.

    Raises:
        BadValueError: An item has no number, or is too long; the message names file and line.
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
            check_length(f"{path}:{start}", size, longest)
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
    number = str(int(number)) if number.isdecimal() else number  # as in judgments
    return fields | {"id": number} | ({"text": fields["title"]} if "title" in fields else {})


def _document(text: str) -> dict[str, Any]:
    number, texts = _NUMBER.search(text), _elements("text", text)
    title = " ".join(_elements(_TITLES, re.split("(?i)<text>", text)[0]))
    rest = re.sub(rf"(?is)<({_NO_TEXT}|{_TITLES})\b[^>]*>.*?</\1\s*>", " ", text)
    return {
        "id": number[1] if number else "",
        "title": _plain(title),
        "text": _plain(" ".join(texts) if texts else rest),
    }


def _elements(names: str, text: str) -> list[str]:
    return [match[2] for match in re.finditer(rf"(?is)<({names})\b[^>]*>(.*?)(?:</\1\s*>|\Z)", text)]


def _plain(text: str) -> str:
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())
