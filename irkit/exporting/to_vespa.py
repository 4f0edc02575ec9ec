"""Write an application of Vespa: ``services.xml``, ``schemas/passage.sd``, and ``feed.jsonl`` with documents.

``vespa deploy FOLDER`` and ``vespa feed FOLDER/feed.jsonl`` load it. Besides ``bm25`` of title and text there
is a rank profile ``vectors`` for the representation: inner product, MaxSim, or sparse inner product with the
tensor ``query(q)``. Keys of metadata that are identifiers become attributes ``metadata_KEY``; ``metadata``
has all of it as a string of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from irkit.arguments import brief
from irkit.errors import BadValueError
from irkit.exporting.contents import Contents, Exported, KeyTypes
from irkit.exporting.marks import MARKS, marks
from irkit.exporting.target import Target

_PLANES = "".join(f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
_REFUSED = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufdd0-\ufdef{_PLANES}]")
"""Characters that no string of Vespa may have: controls such as form feeds of PDF, and noncharacters."""

_TYPES = {"number": "double", "string": "string", "boolean": "bool"}
_SERVICES = """<?xml version="1.0" encoding="UTF-8"?>
<services version="1.0">
    <container id="irkit_container" version="1.0">
        <search></search>
        <document-api></document-api>
        <document-processing></document-processing>
    </container>
    <content id="irkit_content" version="1.0">
        <redundancy>1</redundancy>
        <documents>
            <document type="passage" mode="index"></document>
        </documents>
        <nodes>
            <node distribution-key="0" hostalias="node1"></node>
        </nodes>
    </content>
</services>
"""


def schema(contents: Contents) -> str:
    """Return the schema of a document, in the language of Vespa."""
    fields = [
        _field("id", "string", "summary | attribute"),
        _field("title", "string", "index | summary", "index: enable-bm25"),
        _field("text", "string", "index | summary", "index: enable-bm25"),
        _field("metadata", "string", "summary"),
        _field(MARKS, "array<string>", "attribute"),
    ]
    for name, kind in _attributes(contents.keys).values():
        fields.append(_field(name, kind, "summary | attribute"))
    profiles = [_profile("bm25", "", "bm25(title) + bm25(text)")]
    width = contents.dim
    if contents.kind == "dense":
        metric = "attribute {\n    distance-metric: dotproduct\n}"
        fields.append(_field("vector", f"tensor<float>(x[{width}])", "attribute | index", metric))
        profiles.append(_profile("vectors", f"x[{width}]", "sum(query(q) * attribute(vector))"))
    elif contents.kind == "multi_vector":
        fields.append(_field("vector", f"tensor<float>(token{{}}, x[{width}])", "attribute"))
        maxsim = "sum(reduce(sum(query(q) * attribute(vector), x), max, token), word)"
        profiles.append(_profile("vectors", f"word{{}}, x[{width}]", maxsim))
    elif not contents.is_bm25:
        fields.append(_field("vector", "tensor<float>(term{})", "attribute"))
        profiles.append(_profile("vectors", "term{}", "sum(query(q) * attribute(vector))"))
    document = f"document passage {{\n{_indent(''.join(fields))}}}\n"
    fieldset = "fieldset default {\n    fields: title, text\n}\n"
    return f"schema passage {{\n{_indent(document + fieldset + ''.join(profiles))}}}"


def put(contents: Contents, item: Exported) -> dict[str, Any]:
    """Return the operation of Vespa that stores a document: a line of the feed."""
    document = item.document
    title, text = _clean(document.title), _clean(document.text)
    fields: dict[str, Any] = {"id": document.id, "title": title, "text": text}
    fields["metadata"] = _escape(json.dumps(dict(document.metadata), ensure_ascii=False))
    fields[MARKS] = [_escape(mark) for mark in marks(document.metadata)]
    for key, (name, kind) in _attributes(contents.keys).items():
        value = document.metadata.get(key)
        if value is not None and kind.startswith("array"):
            values = value if isinstance(value, list) else [value]
            value = [one for one in values if one is not None]
        if value is not None:
            fields[name] = _clean(value)
    if contents.kind == "dense":
        fields["vector"] = {"values": item.vector.tolist()}
    elif contents.kind == "multi_vector":
        tokens = {str(number): token.tolist() for number, token in enumerate(item.vector)}
        fields["vector"] = {"blocks": tokens}
    elif not contents.is_bm25:
        fields["vector"] = {"cells": contents.weights("sparse", item.vector)}
    return {"put": f"id:irkit:passage::{document.id}", "fields": fields}


def _clean(value: Any) -> Any:
    """Return a string, or each string of a list, with spaces for characters that Vespa refuses."""
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return _REFUSED.sub(" ", value) if isinstance(value, str) else value


def _escape(text: str) -> str:
    """Return JSON with escapes for characters that Vespa refuses; it stands for the same value."""
    return _REFUSED.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _check_ids(contents: Contents) -> None:
    """Refuse ids that Vespa refuses.

    Raises:
        BadValueError: An id has a control character or a noncharacter.
    """
    for name in contents.ids():
        if found := _REFUSED.search(name):
            raise BadValueError(
                f"export: the id {brief(name)} has the character U+{ord(found[0]):04X}; expected ids without "
                "control characters and noncharacters, which Vespa refuses; rename the document"
            )


def _attributes(keys: dict[str, KeyTypes]) -> dict[str, tuple[str, str]]:
    """Return the name and the type of the attribute of each key that can be one."""
    attributes = {}
    for key, types in keys.items():
        if types.single in _TYPES and re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII):
            kind = _TYPES[types.single]
            attributes[key] = (f"metadata_{key}", f"array<{kind}>" if types.in_lists else kind)
    return attributes


def _field(name: str, kind: str, indexing: str, more: str = "") -> str:
    lines = f"indexing: {indexing}\n" + (f"{more}\n" if more else "")
    return f"field {name} type {kind} {{\n{_indent(lines)}}}\n"


def _profile(name: str, axes: str, expression: str) -> str:
    inputs = f"inputs {{\n    query(q) tensor<float>({axes})\n}}\n" if axes else ""
    phase = f"first-phase {{\n    expression {{\n        {expression}\n    }}\n}}\n"
    return f"rank-profile {name} {{\n{_indent(inputs + phase)}}}\n"


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _lines(contents: Contents) -> Iterator[str]:
    for item in contents:
        yield json.dumps(put(contents, item), ensure_ascii=False) + "\n"


def _write(contents: Contents, path: Path) -> None:
    _check_ids(contents)
    (path / "schemas").mkdir(parents=True)
    (path / "services.xml").write_text(_SERVICES)
    (path / "schemas" / "passage.sd").write_text(schema(contents))
    with (path / "feed.jsonl").open("w", encoding="utf-8", errors="surrogatepass") as stream:
        stream.writelines(_lines(contents))


TARGET = Target(_write, is_folder=True)
