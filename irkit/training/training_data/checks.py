"""Find what is wrong with data before the first step of a training."""

from __future__ import annotations

from collections.abc import Iterable

from irkit.errors import BadValueError, ConfigError
from irkit.training.training_data.dataset import Dataset, Mixture
from irkit.training.training_data.training_row import TrainingRow

_SAMPLE = 10_000


def check(data: Mixture, needs: Iterable[str] = ()) -> dict[str, int]:
    """Look for what would stop or spoil training, in up to 10,000 examples of each dataset.

    Args:
        data: The data to train on.
        needs: What losses need: with ``"targets"`` every document needs a score, with ``"some_targets"`` the
            documents of at least one dataset, with ``"positives"`` some example needs a relevant document.

    Returns:
        The numbers of ``datasets`` and ``examples`` (streams are not counted), and the most ``documents`` of
        an example.

    Raises:
        BadValueError: Texts or scores are missing.
        ConfigError: ``sampling`` needs scores, and there are none.
    """
    needs, most, scored = set(needs), 0, False
    for dataset in data.datasets:
        rows = dataset.sample(_SAMPLE)
        _check_texts(dataset, rows)
        scored |= _check_scores(dataset, rows, needs)
        relevant = (row for row in rows if row.positives or dataset.known(row))
        if "positives" in needs and rows and next(relevant, None) is None:
            raise BadValueError(
                f"{dataset.config.source}: no example has a document that is known to be relevant, which a "
                "loss needs; name judgments (qrels, or split of a BEIR folder), or train on targets"
            )
        widest = max(map(len, rows), default=1)
        most = max(most, min(dataset.config.documents or widest, widest))
    if "some_targets" in needs and not scored:
        raise BadValueError("data: a loss is for examples with the scores of a teacher, and none has any")
    examples = sum(len(dataset) for dataset in data.datasets if not dataset.streaming)
    return {"datasets": len(data.datasets), "examples": examples, "documents": most}


def _check_texts(dataset: Dataset, rows: list[TrainingRow]) -> None:
    """Refuse ids without a text, and texts that are ids."""
    queries = {row.query_id for row in rows if row.query is None}
    documents = {name for row in rows if row.documents is None for name in row.document_ids}
    for key, names, texts in (("queries", queries, dataset.queries), ("corpus", documents, dataset.corpus)):
        missing = sorted(name for name in names if name not in texts)
        if missing:
            source = getattr(texts, "source", None)
            remedy = f"not in {key}: {source}" if source else f"give {key}: where the texts are"
            raise BadValueError(
                f"{dataset.config.source}: no text of {len(missing)} of {len(names)} ids looked for, "
                f"among them {missing[0]!r}; {remedy}"
            )
    written = [text for row in rows for text in row.documents or ()]
    if written and all(text.isdigit() for text in written):
        raise BadValueError(
            f"{dataset.config.source}: the texts are numbers, such as {written[0]!r}; if they are ids, give "
            "corpus (and queries): where the texts are"
        )


def _check_scores(dataset: Dataset, rows: list[TrainingRow], needs: set[str]) -> bool:
    """Return whether there are scores; raise an error if needed ones are missing."""
    config = dataset.config
    without = sum(row.scores is None for row in rows) if config.scores else len(rows)
    if 0 < without < len(rows):
        raise BadValueError(
            f"{config.source}: {without} of {len(rows)} examples looked at have no scores; expected all "
            "or none. Label the others, or set scores: false"
        )
    if without and config.sampling == "top" and config.documents is not None:
        raise ConfigError(
            f"{config.source}: sampling: top needs scores, and it has none; take first or random"
        )
    if without and "targets" in needs:
        why = "scores: false keeps them out" if not config.scores else "irkit label adds them"
        raise BadValueError(
            f"{config.source}: a loss needs the scores of a teacher, and these examples have none; {why}"
        )
    return not without
