"""Masked language modelling: the head of a model has to say which tokens were hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from irkit.errors import BadValueError
from irkit.heads import SparseHead
from irkit.model import Model
from irkit.training.logit_losses import token_loss
from irkit.training.masking import MaskedBatch
from irkit.training.model_step import ModelStep

__all__ = ["MaskedLMStep"]


class MaskedLMStep(ModelStep):
    """Cross-entropy of the hidden tokens under the head of a sparse model, which is a masked language model.

    Logits are computed for hidden tokens alone and never kept, see `irkit.training.logit_losses.token_loss`.

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
        head = self.model.head
        assert isinstance(head, SparseHead)
        hidden = hidden[batch.places].to(torch.promote_types(hidden.dtype, torch.float32))
        for layer in head.layers:
            hidden = layer(hidden)
        total, right = token_loss(hidden, head.weight, head.bias, batch.labels)
        self.parts = {"accuracy": right / max(1, len(batch.labels))}
        return total / self.shared(len(batch.labels), hidden.device)
