"""Detect trainings that collapse, and warn users while there is time to stop.

Each step computes a few sums on the device of the model. The trainer reads these sums only when it logs,
because the host waits for the device then in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from irkit.core.representation import Dense, MultiVector, Representation
from irkit.training.losses import CrossEntropy, InfoNCE, Loss, PairwiseCrossEntropy
from irkit.training.scores import Scores

ALIKE, CHANCE = "alike", "_chance"
"""Signs of a step: the name of `likeness`, and the suffix of a loss for its `chance`."""

Symptom = tuple[str, bool, str]
"""Kind of the symptom, whether it is a collapse if it lasts, and the message."""

_CONTRASTIVE = (InfoNCE, CrossEntropy, PairwiseCrossEntropy)
_STEPS = 20  # after fewer steps nothing is judged
_SETTLED = 0.3  # share of the steps after which something should have been learned
# share of the steps after which regularizers, whose factors rise slowly, should have an effect
_REGULARIZED = 0.5
_LASTING = 10  # steps that a symptom must last
_AT_CHANCE = (0.98, 1.05)  # range of the loss relative to chance; a higher loss is still falling, or diverges
_BELOW_CHANCE = 0.9
_ALL_ALIKE, _UNLIKE = 0.99, 0.9  # mean cosines
_DEAD = 1.0  # terms
_DENSE = 0.9  # share of the vocabulary, like `CalibrationConfig.highest`


def is_sign(name: str) -> bool:
    """Return True if a logged value serves `CollapseWatch` alone and is not written to the log."""
    return name == ALIKE or name.endswith((f"_{ALIKE}", CHANCE))


@torch.no_grad()
def chance(loss: Loss, scores: Scores) -> Tensor | None:
    """Return the value of a contrastive loss if all documents scored the same; None for other losses.

    For InfoNCE without a guide this is the logarithm of the number of competing documents.
    """
    if not isinstance(loss, _CONTRASTIVE):
        return None
    all_zero = None if scores.all is None else torch.zeros_like(scores.all)
    value: Tensor = loss(replace(scores, own=torch.zeros_like(scores.own), all=all_zero))
    return value


@torch.no_grad()
def likeness(rows: Representation) -> Tensor | None:
    """Return the mean cosine of two different rows of a batch: texts of Dense, tokens of MultiVector.

    Returns:
        A scalar on the device of the vectors. None for Sparse, or if there are fewer than two rows.
    """
    if not isinstance(rows, Dense | MultiVector):
        return None
    vectors = rows.values if isinstance(rows, Dense) else rows.tokens.values
    if (count := len(vectors)) < 2:
        return None
    exact = torch.promote_types(vectors.dtype, torch.float32)
    norms = torch.linalg.vector_norm(vectors, dim=1, dtype=exact)
    inverse = torch.where(norms > 0, 1 / norms, 0)
    total = (inverse.to(vectors.dtype) @ vectors).to(exact)  # sum of all unit vectors, without a copy of them
    mean: Tensor = (total.square().sum() - (norms > 0).sum()) / (count * (count - 1))
    return mean


class CollapseWatch:
    """Find the symptoms of a collapse in the log; each kind of symptom is reported once.

    Args:
        rate: The learning rate, which the advice in the messages names.
        vocabulary: Number of terms of a sparse model; None for other models.

    Examples:
        >>> watch = CollapseWatch(1e-3, vocabulary=1000)
        >>> watch({"active_dims_document": 0.2}, 30, 100)
        []
        >>> watch({"active_dims_document": 0.1}, 40, 100)[0][:52]
        'training: documents have 0.1 terms each at step 40: '
    """

    def __init__(self, rate: float, vocabulary: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._slower = f"lower the learning_rate ({rate:.2g}) or make warmup_steps longer"
        self._since, self._reported, self._was_good = dict[str, int](), set[str](), set[str]()

    def __call__(self, logs: Mapping[str, float], step: int, steps: int, *, last: bool = False) -> list[str]:
        """Return the messages of new collapses.

        Args:
            logs: Means of the parts of the loss since the last call.
            step: Number of completed steps.
            steps: Number of all steps.
            last: Whether this is the last call.
        """
        symptoms = {kind: rest for kind, *rest in self._symptoms(logs, step, step / max(1, steps))}
        self._since = {kind: self._since.get(kind, step) for kind in symptoms}
        new = [
            kind
            for kind, (is_collapse, _) in symptoms.items()
            if is_collapse and kind not in self._reported and (last or step - self._since[kind] >= _LASTING)
        ]
        self._reported.update(new)
        return [f"training: {symptoms[kind][1]}" for kind in new]

    def _symptoms(self, logs: Mapping[str, float], step: int, share: float) -> Iterator[Symptom]:
        """Yield the symptoms at this step, whether or not they count as a collapse.

        Args:
            logs: See `__call__`.
            step: Number of completed steps.
            share: Share of all steps that are completed.
        """
        for name, value in logs.items():  # with several heads, after the name of one and "_"
            for side, texts in (("query", "queries"), ("document", "documents")):
                if name.endswith(f"active_dims_{side}") and self._vocabulary is not None:
                    of = _head_of(name, f"active_dims_{side}")
                    yield from self._check_terms(side, of, f"{of}{texts} have", value, step, share)
            if name.endswith(CHANCE):
                yield from self._check_loss(name.removesuffix(CHANCE), logs, step, share)
            elif is_sign(name) and value < _UNLIKE:
                self._was_good.add(name)
            elif is_sign(name) and value >= _ALL_ALIKE:
                message = (
                    f"two vectors of a batch have a cosine of {value:.3f} on average at step {step}: all "
                    f"texts look alike to the model; {self._slower}, and train by a loss with negatives, as "
                    "infonce"
                )
                yield name, self._judged(name, step, share), _head_of(name, ALIKE) + message

    def _check_terms(
        self, side: str, of: str, have: str, terms: float, step: int, share: float
    ) -> Iterator[Symptom]:
        most = self._vocabulary or 0
        if terms < _DEAD:
            yield (
                f"dead {of}{side}",
                True,
                f"{have} {terms:.2g} terms each at step {step}: their sparse vectors are dying, and what has "
                f"no term learns nothing; lower the factor '{side}' of the regularizer, add the regularizer "
                f"anti_zero, or {self._slower}",
            )
        if terms > _DENSE * most:
            yield (
                f"dense {of}{side}",
                share >= _REGULARIZED and step >= _STEPS,
                f"{have} {terms:,.0f} of {most:,} terms each at step {step}: their vectors are not sparse, "
                f"and an index of them is large and slow; raise the factor '{side}' of the regularizer, or "
                f"set {side}_max_active_dims of the model",
            )

    def _check_loss(self, name: str, logs: Mapping[str, float], step: int, share: float) -> Iterator[Symptom]:
        loss, most = logs[name], logs[name + CHANCE]
        if loss < _BELOW_CHANCE * most:
            self._was_good.add(name)
        low, high = _AT_CHANCE
        if 0 < low * most <= loss <= high * most:
            yield (
                name,
                self._judged(name, step, share),
                f"{name} is {loss:.3g} at step {step}, as if all documents scored the same ({most:.3g}): the "
                f"model does not tell relevant documents from others; {self._slower}, and "
                "see whether the temperature fits the scores and the examples are right",
            )

    def _judged(self, name: str, step: int, share: float) -> bool:
        """Return True if a bad value of ``name`` counts as a collapse.

        It counts if an earlier value was good, or if so large a ``share`` of the steps is over that the value
        should be good by now. In the first steps no value counts.
        """
        return step >= _STEPS and (name in self._was_good or share >= _SETTLED)


def _head_of(name: str, value: str) -> str:
    """Return the head of several that a logged value belongs to, as the start of a message; else ""."""
    head = name.removesuffix(value).removesuffix("_")
    return f"head {head}: " if head else ""
