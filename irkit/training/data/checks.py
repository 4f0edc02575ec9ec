"""What can be known to be wrong with data before the first step."""

from __future__ import annotations

from collections.abc import Iterable

from irkit.errors import BadValueError, ConfigError
from irkit.training.data.dataset import Dataset, Mixture
from irkit.training.data.record import Record

__all__ = ["check"]

_SAMPLE = 10_000


def check(data: Mixture, needs: Iterable[str] = ()) -> dict[str, int]:
    """Look for what would stop or spoil training, in up to 10,000 examples of each dataset.

    Args:
        data: What is to be trained on.
        needs: What losses need: with ``"targets"`` every document needs a score, with ``"some_targets"``
            those of one dataset at least, with ``"positives"`` some example a relevant document.

    Returns:
        How many ``datasets`` and ``examples`` there are (examples without streams), and the most
        ``documents`` of an example.

    Raises:
        BadValueError: Texts are missing, or scores are.
        ConfigError: Documents with the highest scores are wanted where there are no scores.
    """
    needed, most, scored = set(needs), 0, False
    for dataset in data.datasets:
        sample = dataset.sample(_SAMPLE)
        _check_texts(dataset, sample)
        _check_ids(dataset, sample)
        scored |= _check_scores(dataset, sample, needed)
        if "positives" in needed and sample and not any(_relevant(dataset, record) for record in sample):
            raise BadValueError(
                f"{dataset.config.source}: no example has a document that is known to be relevant, which a "
                "loss needs; name judgments (qrels, or split of a BEIR folder), or train on targets"
            )
        widest = max(map(len, sample), default=1)
        most = max(most, min(dataset.config.documents or widest, widest))
    if "some_targets" in needed and not scored:
        raise BadValueError("data: a loss is for examples with the scores of a teacher, and none has any")
    examples = sum(len(dataset) for dataset in data.datasets if not dataset.streaming)
    return {"datasets": len(data.datasets), "examples": examples, "documents": most}


def _relevant(dataset: Dataset, record: Record) -> bool:
    return record.positives > 0 or bool(dataset.known(record))


def _check_texts(dataset: Dataset, sample: list[Record]) -> None:
    queries = {record.query_id for record in sample if record.query is None}
    documents = {name for record in sample if record.documents is None for name in record.document_ids}
    for key, names, texts in (("queries", queries, dataset.queries), ("corpus", documents, dataset.corpus)):
        missing = sorted(name for name in names if name not in texts)
        if missing:
            there = getattr(texts, "source", None)
            remedy = f"not in {key}: {there}" if there else f"give {key}: where the texts are"
            raise BadValueError(
                f"{dataset.config.source}: no text of {len(missing)} of {len(names)} ids looked for, "
                f"among them {missing[0]!r}; {remedy}"
            )


def _check_ids(dataset: Dataset, sample: list[Record]) -> None:
    texts = [text for record in sample for text in record.documents or ()]
    if texts and all(text.isdigit() for text in texts):
        raise BadValueError(
            f"{dataset.config.source}: the texts are numbers, such as {texts[0]!r}; if they are ids, give "
            "corpus (and queries): where the texts are"
        )


def _check_scores(dataset: Dataset, sample: list[Record], needed: set[str]) -> bool:
    """Whether there are scores."""
    config = dataset.config
    without = sum(record.scores is None for record in sample) if config.scores else len(sample)
    if 0 < without < len(sample):
        raise BadValueError(
            f"{config.source}: {without} of {len(sample)} examples looked at have no scores; expected all "
            "or none. Label the others, or set scores: false"
        )
    if without and config.sampling == "top" and config.documents is not None:
        raise ConfigError(
            f"{config.source}: sampling: top needs scores, and it has none; take first or random"
        )
    if without and "targets" in needed:
        why = "scores: false keeps them out" if not config.scores else "irkit label adds them"
        raise BadValueError(
            f"{config.source}: a loss needs the scores of a teacher, and these examples have none; {why}"
        )
    return not without
