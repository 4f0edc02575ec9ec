"""One step of training: a batch in, the loss out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from irkit.core.late_interaction import MultiVectorAttention
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, MultiVector, Representation, concat
from irkit.core.scoring import score, score_rows
from irkit.errors import BadValueError
from irkit.heads import Side
from irkit.model import Model
from irkit.model.embeddings import averaged, compare, postprocess
from irkit.model.pipeline import hidden_states
from irkit.training.collapse import ALIKE, CHANCE, chance, likeness
from irkit.training.example import Batch
from irkit.training.gather import Joint, everywhere, join
from irkit.training.losses import Loss, Matryoshka
from irkit.training.model_step import ModelStep
from irkit.training.regularizers import Regularizer
from irkit.training.scores import Scores

Interaction = Callable[[MultiVector, MultiVector], Tensor]


class TrainStep(ModelStep):
    """A model with its losses: called with a batch, it returns the loss.

    The step compares the same vectors as `irkit.Model.encode_representation` returns. They are float32,
    whatever the precision of the encoder.

    Gradient caching (``gradient_cache_size``) makes the memory of a batch independent of its activations.
    Texts are encoded in chunks, of which only the representations are stored. The loss of the whole batch is
    computed from these representations. The backward pass encodes each chunk again, with the same dropout, to
    get the gradients of the weights. The gradients are the same as without caching.

    Attributes:
        model: Trained model.
        losses: Losses; each sees `Scores`, and the weighted sum counts.
        regularizers: Regularisers of a sparse model; each sees the weights of queries and of documents.
        matryoshka: Widths at which all losses are computed; None for the full width only.
        interaction: Compares token vectors, and is trained if it is a module; None for MaxSim.
        gradient_cache_size: Number of texts per chunk; None encodes all at once.
        needs: What the losses read of `Scores`.
        seen: Scores of the last batch at the first width, and the share of the loss that is this process's.
        parts: Values of the losses and regularisers in the last step, and active dimensions of sparse models.

    Examples:
        >>> step = TrainStep(model, [KLDivergence()])  # doctest: +SKIP
        >>> step(batch).backward()  # doctest: +SKIP

    Source: for gradient caching, Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory
    Limited Setup", section 3.2. Here torch's activation checkpointing does the second pass.
    """

    interaction: Interaction | None
    seen: tuple[Scores, float]

    def __init__(
        self,
        model: Model,
        losses: Sequence[Loss],
        *,
        regularizers: Sequence[Regularizer] = (),
        matryoshka: Matryoshka | None = None,
        interaction: Interaction | None = None,
        gradient_cache_size: int | None = None,
    ) -> None:
        """Store model and losses, and check that they fit each other.

        Raises:
            BadValueError: The losses are empty, or a part does not fit the kind of the model.
        """
        _check(model, losses, regularizers, matryoshka, interaction)
        super().__init__(model)
        self.losses, self.regularizers = tuple(losses), tuple(regularizers)
        self.matryoshka, self.interaction = matryoshka, interaction
        self.gradient_cache_size = gradient_cache_size
        self.needs = frozenset[str]().union(*map(_needs, losses))
        widths = {model.dim} if matryoshka is None else {*matryoshka.dims}
        self._guides: dict[str, Model] = {}  # a dict, not submodules: they are not trained
        for loss in losses:
            if "guide" not in loss.needs:
                continue
            name = str(getattr(loss, "guide", ""))
            guide = self._guides[name] = self._guides.get(name) or Model.from_pretrained(name)
            if guide.kind != "dense":
                raise BadValueError(
                    f"TrainStep: the guide {name} makes {guide.kind} vectors, expected a model of one vector "
                    "a text"
                )
            if "vectors" in loss.needs and widths != {guide.dim}:
                raise BadValueError(
                    f"TrainStep: the loss {loss.kind} compares vectors of {sorted(widths)} dimensions with "
                    f"those of its guide, {guide.dim}; choose a guide as wide as the model, and no matryoshka"
                )

    def forward(self, batch: Batch, progress: float = 0.0) -> Tensor:
        """Return the loss of a batch.

        Args:
            batch: Batch on the device of the model.
            progress: Share of completed steps, for the schedules of regularisers.
        """
        self.parts, self.signs = {}, {}
        queries, documents = self.encode(batch.queries, "query"), self.encode(batch.documents, "document")
        return self.compare(batch, queries, documents, progress)

    def compare(
        self, batch: Batch, queries: Representation, documents: Representation, progress: float = 0.0
    ) -> Tensor:
        """Return the loss of a batch whose texts are encoded; arguments as for `forward` and of `encode`."""
        with torch.autocast(batch.own.device.type, enabled=False):
            # representations of other processes, and of the guide models, as far as a loss needs them
            joint = join(
                batch,
                queries,
                documents,
                every_document=bool(self.regularizers)
                or "in_batch" in self.needs
                or getattr(self.interaction, "compares_batch", False),
                every_query="queries" in self.needs,
            )
            guides = {
                name: cache(partial(_guided, guide, batch, joint)) for name, guide in self._guides.items()
            }
            widths: list[tuple[int | None, float]] = [(self.model.truncate_dim, 1.0)]
            if self.matryoshka is not None:
                widths = list(zip(self.matryoshka.dims, self.matryoshka.weights, strict=True))
            # losses at each width
            losses = [loss for loss in self.losses if batch.targets is not None or not loss.scored_only]
            total = torch.zeros((), device=batch.own.device)
            for width, weight in widths:
                scores = self._scores(joint, width)
                if width == widths[0][0]:
                    self.seen = scores, joint.share
                for loss in losses:
                    guide = guides.get(getattr(loss, "guide", None) or "")
                    guided = scores if guide is None else replace(scores, guide=guide)
                    value = joint.share * loss(guided)
                    name = f"{loss.kind}_{width}" if self.matryoshka else loss.kind
                    self._note(name, value)
                    total = total + weight * loss.weight * value
                    if width == widths[0][0] and (at_chance := chance(loss, guided)) is not None:
                        sign = name + CHANCE
                        self.signs[sign] = self.signs.get(sign, 0.0) + joint.share * at_chance
            if (alike := likeness(documents)) is not None:
                self.signs[ALIKE] = alike
            return total + self._penalties(queries, joint, progress)

    def encode(self, tokens: Ragged, side: Side) -> Representation:
        """Encode token ids with gradients; the weights of a sparse model are Dense, ``(n, vocabulary)``."""
        size = self.gradient_cache_size
        if size is None or len(tokens) <= size or not torch.is_grad_enabled():
            return self._encode(tokens, side)
        chunks = [tokens[start : start + size] for start in range(0, len(tokens), size)]

        # torch restores random states by the devices of tensor arguments, and sees no tensor inside a Ragged
        def encode_again(_: Tensor, chunk: Ragged) -> Representation:
            return self._encode(chunk, side)

        return concat(checkpoint(encode_again, chunk.values, chunk, use_reentrant=False) for chunk in chunks)

    def _encode(self, tokens: Ragged, side: Side) -> Representation:
        part = self.model.side_model(side)
        expanded, attended = part.head.expand(tokens, side)
        hidden = hidden_states(part.encoder, part.head, expanded, attended, side)
        return part.head.for_training(hidden, expanded, self.model.pipeline(side).prompt_length, side)

    def _scores(self, joint: Joint, width: int | None) -> Scores:
        """Compare the representations, cut to ``width`` dimensions; None compares them whole."""
        queries = comparable(self.model, joint.queries, width, "query")
        documents = comparable(self.model, joint.documents, width, "document")
        columns = joint.own.clamp(min=0)
        in_batch, matrix = "in_batch" in self.needs, None
        if in_batch or self.interaction is not None or isinstance(queries, Dense):
            matrix = compare_all(self.model, self.interaction, queries, documents)
            own = matrix.gather(1, columns)
        else:
            assert isinstance(queries, MultiVector) and isinstance(documents, MultiVector)  # noqa: PT018
            own = score_rows(queries, documents, columns)
        mask = (joint.own >= 0) & ~own.isneginf()  # nothing is learned from a document without token vectors
        return Scores(
            own=own.masked_fill(~mask, 0.0),
            mask=mask,
            positives=joint.positives,
            targets=None if joint.targets is None else joint.targets.masked_fill(~mask, 0.0),
            all=matrix if in_batch else None,
            columns=columns,
            relevant=joint.relevant if in_batch else None,
            queries=queries.values if isinstance(queries, Dense) else None,
            documents=documents.values if isinstance(documents, Dense) else None,
        )

    def _penalties(self, queries: Representation, joint: Joint, progress: float) -> Tensor:
        """Return the sum of the regularisers, and store the terms per query and per document in `parts`."""
        total = torch.zeros((), device=joint.own.device)
        if not isinstance(joint.documents, Dense) or self.model.kind != "sparse":
            return total
        if joint.of_queries is everywhere:
            queries = joint.queries
        elif self.regularizers:
            queries = everywhere(queries)
        documents = joint.documents.values
        weights = queries.values if isinstance(queries, Dense) else documents[:0]
        self._note("active_dims_query", (weights != 0).sum() / max(1, len(weights)))
        self._note("active_dims_document", (documents != 0).sum() / max(1, len(documents)))
        trained = weights if weights.requires_grad else None
        for regularizer in self.regularizers:
            value = regularizer(trained, documents, progress)
            self._note(regularizer.kind, value)
            total = total + value
        return total

    def _note(self, name: str, value: Tensor) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + value.detach()


def comparable(model: Model, rows: Representation, width: int | None, side: Side) -> Representation:
    """Truncate and normalise rows as `irkit.Model.encode_representation` does, in float32.

    Args:
        model: The model that made the rows.
        rows: Representations of texts of ``side``, from `irkit.heads.Head.for_training`.
        width: Number of leading dimensions to keep; None is all.
        side: Side of the texts.
    """
    rows = rows.to(dtype=torch.float32)
    rows = postprocess(model.head, rows, width, model.similarity_name == "cosine")
    if isinstance(rows, MultiVector) and model.similarity_name == "meanmaxsim" and side == "query":
        return averaged(rows)
    return rows


def compare_all(
    model: Model, interaction: Interaction | None, queries: Representation, documents: Representation
) -> Tensor:
    """Return the scores of all pairs of `comparable` rows, ``(n_q, n_d)`` float32."""
    if isinstance(queries, Dense) and isinstance(documents, Dense):
        return compare(model.similarity_name, queries.values, documents.values)
    if interaction is not None:
        assert isinstance(queries, MultiVector) and isinstance(documents, MultiVector)  # noqa: PT018
        return interaction(queries, documents)
    return score(queries, documents)


def _guided(guide: Model, batch: Batch, joint: Joint) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of a guide ``(b, d)``, and its vectors: ``(b, dim)`` and ``(d, dim)``."""
    if batch.texts is None:
        raise BadValueError("TrainStep: a loss has a guide, but the batch no texts; see Collator")
    device = batch.own.device
    queries = joint.of_queries(guide.encode_representation(batch.texts[0], "query").to(device))
    documents = joint.of_documents(guide.encode_representation(batch.texts[1], "document").to(device))
    assert isinstance(queries, Dense) and isinstance(documents, Dense)  # noqa: PT018 (checked when loaded)
    return score(queries, documents), queries.values, documents.values


def _needs(loss: Loss) -> frozenset[str]:
    """Return what a loss needs; a ``scored_only`` loss needs targets in some batches, not in all."""
    return loss.needs ^ {"targets", "some_targets"} if loss.scored_only else loss.needs


def _check(
    model: Model,
    losses: Sequence[Loss],
    regularizers: Sequence[Regularizer],
    matryoshka: Matryoshka | None,
    interaction: Interaction | None,
) -> None:
    kind, problem = model.kind, None
    vectors = [loss.kind for loss in losses if "vectors" in loss.needs]
    if not losses:
        problem = "got no loss, expected at least one"
    elif all(loss.scored_only for loss in losses):
        problem = (
            "every loss is scored_only: examples without scores would train nothing; leave it out of one"
        )
    elif regularizers and kind != "sparse":
        problem = (
            f"the regulariser {regularizers[0].kind} is for sparse models, this one makes {kind} vectors"
        )
    elif matryoshka is not None and (kind == "sparse" or max(matryoshka.dims) > model.dim):
        problem = f"matryoshka to {max(matryoshka.dims)} dimensions of {kind} vectors of {model.dim}"
    elif matryoshka is not None and isinstance(interaction, MultiVectorAttention):
        problem = "matryoshka cuts token vectors, which attention (mva) takes whole; leave one of both out"
    elif interaction is not None and kind != "multi_vector":
        problem = f"the interaction is for token vectors, this model makes {kind} vectors"
    elif vectors and kind == "multi_vector":
        problem = f"the loss {vectors[0]} compares a vector a text, this model makes a vector a token"
    if problem:
        raise BadValueError(f"TrainStep: {problem}")
