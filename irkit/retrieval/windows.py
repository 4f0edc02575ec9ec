"""Cut documents into the windows that a model encodes, and find the best passage of a document.

Windows are parts of the full text of a document, which begins with its title. Each ends before a word that it
would cut, unless the word is long. A window whose own tokens are more than the model reads, because a
tokenizer treats the start of a text in another way, is divided again. So no token is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from irkit.core.representation import Representation, Several
from irkit.core.scoring import score
from irkit.data import Document
from irkit.encoder_free import EncoderFreeModel
from irkit.errors import BadValueError
from irkit.index import WindowsConfig
from irkit.index.array_files import Array
from irkit.retrieval.collection import AnyModel, Collection
from irkit.retrieval.fusing import Fuse, head_weights
from irkit.retrieval.padding import pad_rows


class Passage(NamedTuple):
    """Where the best window of a document starts and ends, in characters of its text without its title."""

    start: int
    end: int


def parse_windows(windows: Mapping[str, Any] | WindowsConfig | None, model: AnyModel) -> WindowsConfig | None:
    """Return the windows of a build with their length and stride.

    Raises:
        ConfigError: A key or a value is unknown.
        BadValueError: The model reads no texts or texts of any length, or a window is longer than what the
            model reads.
    """
    if windows is None:
        return None
    config = WindowsConfig.of(windows, "windows")
    if isinstance(model, EncoderFreeModel):
        raise BadValueError(
            f"windows: the model {model.name} cuts no texts: it takes documents of any length as a whole; "
            "leave windows out"
        )
    most = _most_tokens(model)
    length = config.length or most
    if length is None:
        raise BadValueError(
            "windows: the model reads texts of any length; give the windows a length, such as "
            "windows={'length': 256}"
        )
    stride = config.stride or length
    if (most is not None and length > most) or stride > length:
        raise BadValueError(
            f"windows: length {length} and stride {stride}; expected a length of at most {most}, which the "
            "model reads beside special tokens and prompt, and a stride of at most the length"
        )
    return config.model_copy(update={"length": length, "stride": stride})


def split_documents(model: Any, windows: WindowsConfig, documents: Sequence[Document]) -> list[Array]:
    """Return where the windows of each document start and end in its full text, ``(n, 2)`` each, n >= 1."""
    texts = [document.full_text for document in documents]
    most = _most_tokens(model)
    spans = [_cut(text, row, windows) for text, row in zip(texts, _offsets(model, texts), strict=True)]
    too_long = True
    while most is not None and too_long:
        too_long = False
        for number, text in enumerate(texts):
            tokens = _offsets(model, [text[start:end] for start, end in spans[number]])
            if max(map(len, tokens)) > most:
                too_long = True
                half = windows.model_copy(update={"length": -(-most // 2), "stride": -(-most // 2)})
                spans[number] = np.concatenate(
                    [
                        start + _cut(text[start:end], own, half) if len(own) > most else [[start, end]]
                        for (start, end), own in zip(spans[number].tolist(), tokens, strict=True)
                    ]
                )
    return [span[:1] for span in spans] if windows.pool == "first" else spans


def window_texts(documents: Sequence[Document], spans: Sequence[Array]) -> list[str]:
    """Return the text of each window, document by document."""
    return [
        document.full_text[start:end]
        for document, span in zip(documents, spans, strict=True)
        for start, end in span.tolist()
    ]


def text_spans(documents: Sequence[Document], spans: Sequence[Array]) -> list[Array]:
    """Convert the spans of windows from positions in the full texts to positions in the texts without titles.

    Args:
        documents: Documents of the index.
        spans: For each document, ``(windows, 2)`` start and end of its windows in the full text.
    """
    result = []
    for document, span in zip(documents, spans, strict=True):
        full = document.full_text
        skipped = full.rindex(document.text.strip()) - (len(document.text) - len(document.text.lstrip()))
        result.append((span - skipped).clip(0, len(document.text)))
    return result


def batch_documents(
    model: Any, windows: WindowsConfig, documents: Iterable[Document], size: int
) -> Iterator[tuple[list[Document], list[Array]]]:
    """Yield documents and their windows: ``size`` windows or more together, if there are as many."""
    batch: list[Document] = []
    spans: list[Array] = []
    count = 0
    for document in documents:
        batch.append(document)
        spans += split_documents(model, windows, [document])
        count += len(spans[-1])
        if count >= size:
            yield batch, spans
            batch, spans, count = [], [], 0
    if batch:
        yield batch, spans


def score_in_windows(
    collection: Collection,
    windows: WindowsConfig,
    contents: Sequence[Any],
    documents: Sequence[Document],
    fuse: Fuse | None = None,
) -> tuple[Array, list[list[Passage]]]:
    """Score documents that need not be in the index, as if they were in it.

    Args:
        collection: Has the model.
        windows: How documents are cut.
        contents: ``n_q`` queries as the model takes them.
        documents: ``n`` documents.
        fuse: Weights of several heads, all 1 by default. The best passage has the highest weighted sum.

    Returns:
        Scores ``(n_q, n)`` float32, and the best passage of each document for each query.
    """
    model: Any = collection.model
    spans = split_documents(model, windows, documents)
    encoded = model.encode_representation(window_texts(documents, spans), "document")
    queries = model.encode_representation(contents, "query")
    ends, pool = np.cumsum([len(span) for span in spans])[:-1], np.mean if windows.pool == "mean" else np.max
    total, table = np.zeros((len(queries), len(encoded))), np.zeros((len(queries), len(documents)))
    for rows, others, weight in _heads(queries, encoded, fuse):
        with torch.inference_mode():
            scores = score(rows, others).double().cpu().numpy()
        pooled = np.stack([pool(part, axis=1) for part in np.split(scores, ends, axis=1)], axis=1)
        if isinstance(queries, Several):  # a text without tokens adds nothing
            scores, pooled = (np.where(np.isneginf(part), 0.0, part) for part in (scores, pooled))
        total, table = total + weight * scores, table + weight * pooled
    best = np.stack([part.argmax(1) for part in np.split(total, ends, axis=1)], axis=1)
    text_windows = text_spans(documents, spans)
    return table.astype(np.float32), [
        [Passage(*span[number].tolist()) for span, number in zip(text_windows, line, strict=True)]
        for line in best
    ]


def _heads(
    queries: Representation, documents: Representation, fuse: Fuse | None
) -> Iterator[tuple[Any, Any, float]]:
    """Yield the queries, the documents and the weight of each head."""
    if not isinstance(queries, Several):
        yield queries, documents, 1.0
        return
    for name, weight in head_weights(queries, fuse).items():
        yield queries.parts[name], cast(Any, documents).parts[name], weight


def find_passages(
    index: Any,
    queries: Callable[[], Representation],
    rows: Sequence[Array],
    fuse: Fuse | None = None,
) -> list[list[Passage | None]]:
    """Return the best passage of each document of the index for its query; None without windows.

    Args:
        index: The `irkit.index.Index` of the documents.
        queries: Returns the queries; called if there are windows.
        rows: Documents for each query.
        fuse: Weights of several heads, all 1 by default.
    """
    if index.windows is None:
        return [[None] * len(line) for line in rows]
    passages: list[list[Passage | None]] = [[] for _ in rows]
    if not any(map(len, rows)):
        return passages
    encoded = queries()
    weights = (head_weights(encoded, fuse),) if isinstance(encoded, Several) else ()
    for numbers, padded in pad_rows(rows):
        spans = index.passages(encoded[numbers], padded, *weights).tolist()
        for number, line in zip(numbers.tolist(), spans, strict=True):
            passages[number] = [Passage(*span) for span in line[: len(rows[number])]]
    return passages


def _most_tokens(model: Any) -> int | None:
    """Return the number of tokens that a model reads of a document; None if it is not limited."""
    most: int | None = model.max_length("document")
    if most is None:
        return None
    spans = model.token_spans("a " * most, "document")
    count: int = sum(span.start < span.end for span in spans)
    return max(1, count)


def _offsets(model: Any, texts: Sequence[str]) -> list[Array]:
    """Return where the tokens of each text start and end, ``(n, 2)`` each."""
    offsets: list[Array] = model.pipeline("document").tokenizer.offsets(texts)
    return offsets


def _cut(text: str, offsets: Array, windows: WindowsConfig) -> Array:
    """Return where windows start and end in a text, ``(n, 2)``."""
    length, stride = windows.length, windows.stride
    assert length is not None
    assert stride is not None
    count = len(offsets)
    if count <= length:
        return np.array([[0, len(text)]])
    starts, ends = offsets.T.tolist()
    reach = (min(length, stride) + 1) // 2  # tokens of a word that are moved to the next window, at most

    def cut(token: int) -> int:
        """Return the token that begins the word of a token, if it is near."""
        for first in range(token, max(0, token - reach), -1):
            before = text[starts[first] - 1 : starts[first] + 1]
            if starts[first] > ends[first - 1] or any(map(str.isspace, before)):
                return first
        return token

    spans, first = [], 0
    while True:
        stop = count if first + length >= count else cut(first + length)
        spans.append([starts[first], ends[stop - 1]])
        if stop == count:
            break
        first = min(stop, cut(first + stride))
    spans[0][0], spans[-1][1] = 0, len(text)
    return np.array(spans)
