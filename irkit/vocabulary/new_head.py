"""Give a model another output vocabulary: it gets a new output matrix; the encoder keeps its tokens."""

from __future__ import annotations

from torch import nn

from irkit.errors import BadValueError
from irkit.heads import as_sparse_head
from irkit.model import Model


def head_only(source: Model, transferred: Model) -> Model:
    """Make a model that reads the tokens of one model and gives weights to the terms of the other.

    Only the output matrix is replaced, like in ESPLADE; `irkit.vocabulary.adapt` with ``labels`` trains it.

    Args:
        source: A sparse model; tokenizer, encoder and the layers of its head are shared. Its prompts and its
            similarity are copied.
        transferred: The same model on another vocabulary, see `irkit.vocabulary.transfer_vocabulary`; its
            matrix and its bias are copied.

    Raises:
        BadValueError: A model is not sparse, or the hidden states have different widths.

    Examples:
        >>> model = head_only(source, transfer_vocabulary(source, target).model)  # doctest: +SKIP

    Source: "Bridging Vocabulary Gaps", section 6.3; Dudek et al. 2023, "Learning Sparse Lexical
    Representations Over Specified Vocabularies for Retrieval".
    """
    if (source.kind, transferred.kind) != ("sparse", "sparse"):
        raise BadValueError(
            f"head_only: got a {source.kind} and a {transferred.kind} model, expected two sparse ones"
        )
    ours, theirs = (as_sparse_head(model.head, "head_only") for model in (source, transferred))
    if ours.weight.shape[1] != theirs.weight.shape[1]:
        raise BadValueError(
            f"head_only: matrices of widths {ours.weight.shape[1]} and {theirs.weight.shape[1]}; expected a "
            "model and the same one on another vocabulary"
        )
    bias = theirs.bias
    terms = theirs.vocabulary or transferred.tokenizer.tokens(theirs.dim)
    weight = nn.Parameter(theirs.weight.detach().clone())
    bias = None if bias is None else nn.Parameter(bias.detach().clone())
    head = ours.with_matrix(weight, bias, terms)
    model = Model(
        source.tokenizer,
        source.encoder,
        head,
        prompts=source.prompts,
        default_prompt_name=source.default_prompt_name,
        similarity_name=source.similarity_name,
    )
    return model.to(source.device).eval()
