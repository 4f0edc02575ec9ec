"""Teachers: whatever scores documents for a query, to label examples and to judge negatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch

from irkit.arguments import shown
from irkit.data import Document, Query
from irkit.errors import BadTypeError, BadValueError, StorageError, require
from irkit.index.place import MANIFEST
from irkit.lookup import find_rows
from irkit.model import Model
from irkit.retriever import Retriever
from irkit.scoring import score

__all__ = [
    "Activation",
    "CrossEncoder",
    "IndexTeacher",
    "ModelTeacher",
    "Teacher",
    "load_teacher",
    "score_all",
    "shortest",
]

Array: TypeAlias = np.ndarray[Any, Any]
Activation: TypeAlias = Literal["none", "sigmoid"]

CROSS_ENCODER = "cross-encoder:"
_QUERIES = 16  # whose documents are encoded together
_TOKENS = 8192  # of a step of a cross-encoder, padding included


class Teacher(Protocol):
    """Scores documents for queries; higher is better."""

    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """Score the documents of each query.

        Args:
            queries: Ids and texts.
            documents: Those of each query.

        Returns:
            Of each query a float per document, in their order.
        """
        ...


class IndexTeacher:
    """Scores of the model of an index, exact, for documents that are in it: only queries are encoded."""

    def __init__(self, retriever: Retriever) -> None:
        self.retriever = retriever

    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """See `Teacher`; by id, the texts given are not looked at.

        Raises:
            BadValueError: The index has no document of an id.
        """
        _check(queries, documents)
        advice = "index the collection that the examples are of, or take a model as teacher"
        ids = [document.id for document in chain.from_iterable(documents)]
        found = find_rows(self.retriever.documents, ids, "scoring", advice)
        rows = np.full((len(queries), max(map(len, documents), default=0)), -1, np.int64)
        there = np.arange(rows.shape[1]) < np.array([len(some) for some in documents])[:, None]
        rows[there] = found
        contents = [self.retriever.content(query) for query in queries]
        scores = self.retriever.index.rescore(self.retriever.model.represent(contents, "query"), rows)
        return [line[: len(some)] for line, some in zip(scores, documents, strict=True)]


class ModelTeacher:
    """Scores of a retriever model, which encodes the documents of some queries at a time."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """See `Teacher`."""
        _check(queries, documents)
        parts = range(0, len(queries), _QUERIES)
        return [
            line
            for start in parts
            for line in self._some(queries[start : start + _QUERIES], documents[start : start + _QUERIES])
        ]

    @torch.inference_mode()
    def _some(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        places: dict[str, int] = {}  # each text is encoded once
        for document in chain.from_iterable(documents):
            places.setdefault(document.full_text, len(places))
        if not places:
            return [np.empty(0, np.float32) for _ in queries]
        asked = self.model.represent([query.text for query in queries], "query")
        answers = self.model.represent(list(places), "document")
        return [
            score(asked[i : i + 1], answers[[places[document.full_text] for document in some]])[0].numpy()
            if some
            else np.empty(0, np.float32)
            for i, some in enumerate(documents)
        ]


class CrossEncoder:
    """A transformer that reads query and document together (Nogueira and Cho 2019).

    Args:
        name: Directory or hub name of a sequence classifier of one label, or of two, of which the score is
            the log odds of the second.
        device: Where it runs; by default a GPU if there is one.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_length: Tokens of a pair; a longer one is cut, the longer text first. By default what it allows.
        activation: ``"none"``: logits, which margins and KL divergence are defined on; or ``"sigmoid"``.

    Raises:
        StorageError: There is no such model.
        BadValueError: It is no classifier of one or two labels, or a setting is unknown.

    Source: https://arxiv.org/abs/1901.04085
    """

    def __init__(
        self,
        name: str,
        *,
        device: str | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        activation: Activation = "none",
    ) -> None:
        transformers = require("transformers", "train", "A cross-encoder")
        precisions = {each: getattr(torch, each) for each in ("float32", "bfloat16", "float16")}
        for setting, value, known in (
            ("dtype", dtype, precisions),
            ("activation", activation, get_args(Activation)),
        ):
            if value not in known:
                raise BadValueError(f"cross-encoder: {setting} {value!r}; expected {' or '.join(known)}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.activation = activation
        try:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise StorageError(f"loading the cross-encoder {name}: {error}") from error
        architectures = config.architectures or []
        if config.num_labels not in (1, 2) or not any("Classif" in each for each in architectures):
            raise BadValueError(
                f"cross-encoder {name}: it is {' '.join(architectures) or config.model_type} with "
                f"{config.num_labels} labels; expected a sequence classifier with 1 or 2, such as "
                "cross-encoder/ms-marco-MiniLM-L6-v2"
            )
        with _quiet(transformers.utils.logging):
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                name, dtype=precisions[dtype], trust_remote_code=False
            )
        self.model = model.to(self.device).eval()
        limits = (self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
        self.max_length = min(limit for limit in (max_length, *limits) if limit is not None)

    @torch.inference_mode()
    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """See `Teacher`."""
        _check(queries, documents)
        pairs = [
            (query.text, doc.full_text)
            for query, some in zip(queries, documents, strict=True)
            for doc in some
        ]
        scores = np.empty(len(pairs), np.float32)
        if pairs:
            rows = self.tokenizer(
                [query for query, _ in pairs],
                [document for _, document in pairs],
                truncation="longest_first",
                max_length=self.max_length,
            )
            lengths = np.array([len(row) for row in rows["input_ids"]])
            for step in _steps(lengths):  # of like lengths: little padding
                some = {key: [values[i] for i in step] for key, values in rows.items()}
                logits = self.model(**self.tokenizer.pad(some, return_tensors="pt").to(self.device)).logits
                values = (logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]).float()
                scores[step] = (values.sigmoid() if self.activation == "sigmoid" else values).cpu().numpy()
        ends = np.cumsum([len(some) for some in documents])
        return np.split(scores, ends[:-1])


def _check(queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> None:
    """Raise unless there are queries, and documents of each of them."""
    some = list(documents)
    if len(queries) != len(some):
        raise BadValueError(
            f"scoring: got {len(queries)} queries and documents of {len(some)}; expected those of each query"
        )
    flat = chain.from_iterable([each] if isinstance(each, str | Document) else each for each in some)
    for kind, items in ((Query, queries), (Document, flat)):
        wrong = next((item for item in items if not isinstance(item, kind)), None)
        if wrong is not None:
            name = kind.__name__
            raise BadTypeError(
                f"scoring: got {shown(wrong)}, expected a {name}, such as irkit.data.{name}('1', 'a text')"
            )


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without the bar of transformers, which is drawn where there is no terminal, too."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _steps(lengths: Array) -> list[list[int]]:
    """Positions by descending length, as many a step as make `_TOKENS`."""
    order = np.argsort(-lengths, kind="stable").tolist()
    steps, start = [], 0
    while start < len(order):
        size = max(1, _TOKENS // max(1, int(lengths[order[start]])))
        steps.append(order[start : start + size])
        start += size
    return steps


def load_teacher(
    choice: str | Path | Retriever | Model | Teacher,
    *,
    device: str | None = None,
    dtype: str = "float32",
    max_length: int | None = None,
    activation: Activation = "none",
) -> Teacher:
    """The teacher that is meant.

    Args:
        choice: A `Retriever` or the directory of an index; a model, or what `Model.from_pretrained` takes;
            ``"cross-encoder:NAME"``; or any `Teacher`.
        device: Where a model that is loaded here runs.
        dtype: Its precision.
        max_length: Of a `CrossEncoder` only.
        activation: Of a `CrossEncoder` only.

    Raises:
        StorageError: There is no such index or model.
        BadValueError: ``max_length`` or ``activation`` of something else than a cross-encoder.
    """
    if isinstance(choice, str) and choice.startswith(CROSS_ENCODER):
        name = choice.removeprefix(CROSS_ENCODER)
        return CrossEncoder(name, device=device, dtype=dtype, max_length=max_length, activation=activation)
    if max_length is not None or activation != "none":
        raise BadValueError(
            f"teacher {choice}: max_length and activation are settings of a cross-encoder; leave them out or "
            f"name one as {CROSS_ENCODER}NAME"
        )
    if isinstance(choice, str | Path):
        place = Path(choice)
        is_index = (place / MANIFEST).exists() and not (place / "config.json").exists()
        choice = (
            Retriever.load(place, device=device, dtype=dtype)
            if is_index and not (place / "modules.json").exists()
            else Model.from_pretrained(choice, device=device, dtype=dtype)
        )
    if isinstance(choice, Retriever):
        return IndexTeacher(choice)
    return ModelTeacher(choice) if isinstance(choice, Model) else choice


def score_all(
    teacher: Teacher, queries: Sequence[Query], documents: Sequence[Sequence[Document]]
) -> list[Array]:
    """What a teacher gives, checked: of each query ``(n,)`` finite float32.

    Raises:
        BadValueError: Numbers that do not match, or one that is not finite.
    """
    given = [np.asarray(line, np.float32) for line in teacher(queries, documents)]
    if [line.shape for line in given] != [(len(some),) for some in documents]:
        raise BadValueError(
            f"scoring: the teacher gave scores of shapes {[line.shape for line in given[:3]]} ...; expected "
            f"{[(len(some),) for some in documents[:3]]} ..., one a document"
        )
    for query, some, line in zip(queries, documents, given, strict=True):
        if not np.isfinite(line).all():
            worst = int(np.isfinite(line).argmin())
            raise BadValueError(
                f"scoring: the teacher gave {line[worst]} for query {query.id!r} and document "
                f"{some[worst].id!r}; expected a finite number. Has the document no text?"
            )
    return given


def shortest(scores: Array) -> tuple[float, ...]:
    """Scores for a file: of float32 no more digits than tell them apart."""
    return tuple(float(value) for value in scores.astype(np.float32).astype(str))
