"""Masked language modelling: the head of a model has to say which tokens were hidden."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from irkit.errors import BadValueError
from irkit.heads import SparseHead
from irkit.model import Model
from irkit.training.masking import MaskedBatch
from irkit.training.model_step import ModelStep

__all__ = ["MaskedLMStep"]

_LOGITS = 1 << 25  # computed at once: 128 MB in float32


class MaskedLMStep(ModelStep):
    """Cross-entropy of the hidden tokens under the head of a sparse model, which is a masked language model.

    Logits are computed for hidden tokens alone, in pieces that are computed again in the backward pass, so
    that memory does not grow with the vocabulary.

    Attributes:
        model: A sparse model.
        parts: ``accuracy``, the share of hidden tokens that had the highest logit.

    Examples:
        >>> step = MaskedLMStep(model)  # doctest: +SKIP
        >>> step(Masking(model.tokenizer)([(0, "a text")])).backward()  # doctest: +SKIP
    """

    def __init__(self, model: Model) -> None:
        """Take a model.

        Raises:
            BadValueError: It is not sparse.
        """
        if not isinstance(model.head, SparseHead):
            raise BadValueError(
                f"masked language modelling: the model makes {model.kind} vectors, expected a sparse one; "
                "Model.sparse makes one of any encoder"
            )
        super().__init__(model)

    def forward(self, batch: MaskedBatch, progress: float = 0.0) -> Tensor:
        """The mean over what is asked for, 0 if nothing is.

        Args:
            batch: On the device of the model.
            progress: Of no use.

        Raises:
            BadValueError: The encoder pools, so that tokens have no hidden states of their own.
        """
        hidden = self.model.encoder(batch.tokens).values
        if len(hidden) != len(batch.tokens.values):
            raise BadValueError(
                f"masked language modelling: the encoder makes {len(hidden)} states of "
                f"{len(batch.tokens.values)} tokens; expected one that does not pool"
            )
        hidden = hidden[batch.places]
        size, asked = max(1, _LOGITS // self.model.head.dim), len(batch.labels)
        total, right = hidden.sum() * 0.0, torch.zeros((), device=hidden.device)
        for start in range(0, asked, size):
            part, labels = hidden[start : start + size], batch.labels[start : start + size]
            if asked > size and torch.is_grad_enabled():
                loss, found = checkpoint(self._loss, part, labels, use_reentrant=False)
            else:
                loss, found = self._loss(part, labels)
            total, right = total + loss, right + found
        self.parts = {"accuracy": right / max(1, asked)}
        return total / self._shared(asked, hidden.device)

    def _shared(self, asked: int, device: torch.device) -> float:
        """What all processes ask for, a part for each: then the mean over processes is that over tokens."""
        if not (self.training and dist.is_initialized()):  # only one process evaluates
            return max(1, asked)
        count = torch.tensor(asked, dtype=torch.float64, device=device)
        dist.all_reduce(count)
        return max(1.0, float(count)) / dist.get_world_size()

    def _loss(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses, and number of right answers."""
        head = self.model.head
        assert isinstance(head, SparseHead)
        weight: Tensor = head.weight
        bias: Tensor | None = head.bias
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        for layer in head.layers:
            hidden = layer(hidden)
        logits = F.linear(hidden, weight, bias).float()
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()
