"""The other way to weights over a vocabulary: its own matrix behind an encoder that keeps its tokens."""

from __future__ import annotations

from torch import nn

from irkit.errors import BadValueError
from irkit.heads import SparseHead
from irkit.model import Model

__all__ = ["head_only"]


def head_only(source: Model, transferred: Model) -> Model:
    """A model that reads the tokens of one model and gives weights to the terms of the other.

    Only the matrix behind the hidden states is replaced, as ESPLADE does; `irkit.vocabulary.adapt` with
    ``labels`` trains it.

    Args:
        source: A sparse model, whose tokenizer, encoder and layers of the head are shared.
        transferred: The same on another vocabulary, see `irkit.vocabulary.transfer_vocabulary`; its matrix
            and its bias are copied.

    Raises:
        BadValueError: One is not sparse, or their hidden states have different widths.

    Examples:
        >>> model = head_only(source, transfer_vocabulary(source, target).model)  # doctest: +SKIP

    Source: "Bridging Vocabulary Gaps", section 6.3; Dudek et al. 2023, "Learning Sparse Lexical
    Representations Over Specified Vocabularies for Retrieval".
    """
    ours, theirs = source.head, transferred.head
    if not isinstance(ours, SparseHead) or not isinstance(theirs, SparseHead):
        raise BadValueError(
            f"head_only: got a {source.kind} and a {transferred.kind} model, expected two sparse ones"
        )
    if ours.weight.shape[1] != theirs.weight.shape[1]:
        raise BadValueError(
            f"head_only: matrices of widths {ours.weight.shape[1]} and {theirs.weight.shape[1]}; expected a "
            "model and the same one on another vocabulary"
        )
    bias = theirs.bias
    terms = theirs.vocabulary or transferred.tokenizer.tokens(theirs.dim)
    head = SparseHead(
        ours.layers,
        nn.Parameter(theirs.weight.detach().clone()),
        None if bias is None else nn.Parameter(bias.detach().clone()),
        ours.config,
        vocabulary=terms,
    )
    head.lengths = {**ours.lengths}
    return Model(source.tokenizer, source.encoder, head, prompts=source.prompts).to(source.device).eval()
