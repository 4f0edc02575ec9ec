"""Where examples come from, and which documents of each are used."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from irkit.config import Config

__all__ = ["DataConfig", "Format", "Sampling"]

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
"""How the lines of a source are read; see docs/training_data.md."""

Sampling = Literal["first", "random", "top"]
"""Which documents of a record are used: the first, any, or those with the highest scores."""


class DataConfig(Config):
    """One source of examples.

    Attributes:
        source: A file, a BEIR folder, or ``hf:NAME[:CONFIG][:SPLIT]``.
        format: ``"auto"`` tells it from the first line.
        queries: Source of the query texts (see `irkit.data`) where ``source`` has ids; by default the folder
            that ``corpus`` or ``source`` is.
        corpus: Source of the document texts where ``source`` has ids.
        qrels: Judgments: which documents of a run are relevant, and which must not be negatives.
        split: Split of the judgments where the folder of ``source`` or of ``corpus`` has them.
        relevant_grade: Least grade of a judgment that counts as relevant.
        negatives: Of a BEIR folder: a run whose documents, unless relevant, are the negatives.
        scores: Whether scores that the source has become targets.
        documents: Documents of each example: one relevant and the others not, or, where there are scores,
            any; None takes all.
        sampling: Which: the first, any (drawn anew in every epoch), or those with the highest scores.
        weight: Share of the batches; None, as all datasets must then have it: by the number of examples.
        shuffle: Whether examples come in random order, other in every epoch.
        streaming: Read front to back, in blocks that are shuffled, rather than indexed: for pipes and for
            what is too large. It never ends, so training needs ``max_steps``.
        limit: Use this many examples, the first.
        sample: Use this many examples, drawn at random from all: the same ones at every seed, and whether
            they are streamed or not. A stream is read once more, to count what there is.
    """

    source: str
    format: Format = "auto"
    queries: str | None = None
    corpus: str | None = None
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
    def _first_or_drawn(self) -> Self:
        if self.limit is not None and self.sample is not None:
            raise ValueError("'limit' takes the first examples, 'sample' draws some; leave one out")
        return self
