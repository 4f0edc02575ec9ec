"""Masked language modelling: the head of a sparse model predicts which tokens were hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from irkit.errors import BadValueError
from irkit.heads import as_sparse_head
from irkit.model import Model
from irkit.training.logit_losses import token_loss
from irkit.training.masking import MaskedBatch
from irkit.training.model_step import TextStep


class MaskedLMStep(TextStep):
    """Cross-entropy of the hidden tokens under the head of a sparse model, which is a masked language model.

    Logits are computed for the hidden tokens only and never stored, see
    `irkit.training.logit_losses.token_loss`.

    Attributes:
        model: A sparse model.
        parts: ``accuracy``, the share of hidden tokens that had the highest logit.

    Examples:
        >>> step = MaskedLMStep(model)  # doctest: +SKIP
        >>> step(Masking(model.tokenizer)([(0, "a text")])).backward()  # doctest: +SKIP
    """

    def __init__(self, model: Model) -> None:
        """Store the model.

        Raises:
            BadValueError: The model is not sparse.
        """
        if model.kind != "sparse":
            raise BadValueError(
                f"masked language modelling: the model makes {model.kind} vectors, expected a sparse one; "
                "Model.sparse makes one of any encoder"
            )
        super().__init__(model)

    def forward(self, batch: MaskedBatch, progress: float = 0.0) -> Tensor:
        """Return the mean loss over the hidden tokens; 0 without hidden tokens.

        Args:
            batch: A batch on the device of the model.
            progress: Not used.

        Raises:
            BadValueError: The encoder pools, so that tokens have no hidden states of their own.
        """
        sums = self.loss_sums(batch)
        (loss, count), (right, _) = sums["loss"], sums["accuracy"]
        self.parts = {"accuracy": right / max(1, count)}
        return loss / self.divisor(count)

    def loss_sums(self, batch: MaskedBatch) -> dict[str, tuple[Tensor, int]]:
        """Sum the loss and the correct predictions over the hidden tokens of a batch.

        Returns:
            ``loss`` and ``accuracy``: per name the sum, and the number of hidden tokens.
        """
        hidden = self.model.encoder(batch.tokens).values
        if len(hidden) != len(batch.tokens.values):
            raise BadValueError(
                f"masked language modelling: the encoder makes {len(hidden)} states of "
                f"{len(batch.tokens.values)} tokens; expected one that does not pool"
            )
        head = as_sparse_head(self.model.head, "masked language modelling")
        hidden = hidden[batch.positions].to(torch.promote_types(hidden.dtype, torch.float32))
        for layer in head.layers:
            hidden = layer(hidden)
        loss, right = token_loss(hidden, head.weight, head.bias, batch.labels)
        count = len(batch.labels)
        return {"loss": (loss, count), "accuracy": (right, count)}
