"""Configuration of a dataset: where its examples come from, and which of their documents are used."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from irkit.config import Config

Format = Literal[
    "auto",
    "beir",
    "columns",
    "distillation",
    "flagembedding",
    "irkit",
    "nway",
    "opensearch",
    "pickle",
    "run",
    "tevatron",
    "tuples",
    "vienna",
]
"""Format of a source; see docs/training_data.md."""

Sampling = Literal["first", "random", "top"]
"""Which documents of a row are used: the first, any, or those with the highest scores."""


class Columns(Config):
    """The columns or keys of a source of texts that have other names than usual.

    Attributes:
        id: Name of the id.
        text: Name of the text, or of several, which are joined by spaces.
        title: Name of the title of a document.
    """

    id: str | None = None
    text: str | list[str] | None = None
    title: str | None = None


class DataConfig(Config):
    """One source of examples.

    Attributes:
        source: A file, a BEIR folder, or ``hf:NAME[:CONFIG][:SPLIT]``.
        format: Format of the rows; ``"auto"`` detects it from the first line.
        queries: Source of the query texts (see `irkit.data`) if ``source`` has ids; by default the folder
            that ``corpus`` or ``source`` is.
        corpus: Source of the document texts if ``source`` has ids.
        query_columns: Columns or keys of ``queries`` with other than usual names.
        corpus_columns: Columns or keys of ``corpus`` with other than usual names.
        qrels: Source of judgments. They decide which documents of a run are relevant, and which documents
            must not become negatives.
        split: Split of the judgments in the folder of ``source`` or of ``corpus``.
        relevant_grade: Lowest grade of a judgment that counts as relevant.
        negatives: Only for a BEIR folder: path of a run. Its documents become the negatives, unless they are
            relevant.
        scores: Whether the scores in the source become the targets of losses.
        documents: Number of documents of each example. Without scores, one is relevant and the others are
            not; with scores, any documents are taken. None takes all.
        sampling: Which documents are taken, if there are more: ``"first"``; ``"random"``, drawn again in each
            epoch; or ``"top"``, those with the highest scores.
        weight: Share of the batches that this dataset gets, relative to the weights of the others. None mixes
            datasets by their numbers of examples; then no dataset may have a weight.
        shuffle: Whether examples come in random order, another one in every epoch.
        streaming: Whether to read front to back, in blocks that are shuffled, instead of by position: for
            pipes and for very large sources. A stream never ends, so training needs ``max_steps``.
        limit: Number of examples to use, the first ones; None uses all.
        sample: Number of examples to use, drawn at random; None uses all. The same ones are drawn for every
            seed, streamed or not. A stream is read once more, to count its examples.
    """

    source: str
    format: Format = "auto"
    queries: str | None = None
    corpus: str | None = None
    query_columns: Columns | None = None
    corpus_columns: Columns | None = None
    qrels: str | None = None
    split: str | None = None
    relevant_grade: Annotated[int, Field(ge=1)] = 1
    negatives: str | None = None
    scores: bool = True
    documents: Annotated[int, Field(ge=1)] | None = None
    sampling: Sampling = "random"
    weight: Annotated[float, Field(gt=0)] | None = None
    shuffle: bool = True
    streaming: bool = False
    limit: Annotated[int, Field(ge=1)] | None = None
    sample: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.query_columns is not None and self.query_columns.title is not None:
            raise ValueError("'query_columns' has a title, but a query has none; leave it out")
        if self.limit is not None and self.sample is not None:
            raise ValueError("'limit' takes the first examples, 'sample' draws some; leave one out")
        return self
