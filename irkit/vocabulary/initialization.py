"""Initial embeddings of new tokens: mixtures of the embeddings of tokens that the model has.

`semantic_mixture` weighs shared tokens by their similarity in the embeddings of the target,
`subtoken_mixture` the tokens into which the source splits a new token. `carry_over` applies a mixture to
embeddings and to the output matrix, and `align_prior` moves the output bias.

Source: "Bridging Vocabulary Gaps", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.config import Config
from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.errors import BadValueError
from irkit.tokenizer import Tokenizer
from irkit.vocabulary.alignment import Alignment, Form, Spelling
from irkit.vocabulary.simplex import sparsemax

_TEXTS = 1024  # texts tokenised at once
_EXCLUDED = -5000.0  # terms with a bias below can never have a weight


class TransferConfig(Config):
    """How a model is moved onto another vocabulary.

    Attributes:
        initialization: Embeddings of new tokens. ``"semantic"``: mixtures of the shared tokens that are near
            them in the embeddings of the target; ``"subtoken"``: the mean of the tokens into which the source
            splits them; ``"mean"``: the mean of all shared tokens, or of all tokens if only special ones are
            shared; ``"random_new"``: random; ``"random_all"``: random for the shared tokens, too. ``"auto"``
            is semantic if the target has embeddings, else subtoken.
        bias: Output bias. ``"prior"`` rescales the frequencies of the target vocabulary to the range of the
            source (PDA); ``"copied"`` mixes biases like embeddings.
        normalize: Match tokens also if only case or accents differ, see `align`.
        seed: Seed of random embeddings.

    Source: "Bridging Vocabulary Gaps", section 4.2.2 and table 3.
    """

    initialization: Literal["auto", "semantic", "subtoken", "mean", "random_new", "random_all"] = "auto"
    bias: Literal["prior", "copied"] = "prior"
    normalize: bool = False
    seed: int = 0


def anchors(alignment: Alignment) -> Tensor:
    """Return the target ids of the shared tokens that new tokens are compared with, one per source token.

    Special tokens are left out, because they have no meaning to share.
    """
    usable = ~alignment.is_new & ~alignment.special
    ids = usable.nonzero()[:, 0].tolist()
    first = dict(zip(reversed(alignment.source_ids[usable].tolist()), reversed(ids), strict=True))
    return torch.tensor(sorted(first.values()), dtype=torch.int64)


def semantic_mixture(alignment: Alignment, embeddings: Tensor, scores: int = 2**24) -> Sparse:
    """Weigh the shared tokens near each new token: sparsemax of cosines of the target embeddings.

    Similarities are computed block by block, and never held as a whole.

    Args:
        alignment: Alignment of source and target.
        embeddings: ``(V', width)``, the word embeddings of the target.
        scores: Number of similarities that are held at once, 4 bytes each.

    Returns:
        One row per new token, over the ids of the source; rows add up to 1.

    Raises:
        BadValueError: No token is shared.

    Source: "Bridging Vocabulary Gaps", equations 7 and 8.
    """
    shared, new = anchors(alignment), alignment.is_new.nonzero()[:, 0]
    if not len(shared):
        raise BadValueError(
            "semantic initialisation: source and target share no tokens to compare with; take subtoken"
        )
    unit = F.normalize(embeddings.detach().float(), dim=1)
    anchor_vectors = unit[shared.to(unit.device)].T.contiguous()
    blocks = torch.split(new.to(unit.device), max(1, scores // len(shared)))
    parts = [sparsemax(unit[block] @ anchor_vectors) for block in blocks]
    lengths = torch.cat([new.new_zeros(0), *(part.terms.lengths for part in parts)])
    positions = torch.cat([new.new_zeros(0), *(part.terms.values.cpu() for part in parts)])
    weights = torch.cat([torch.zeros(0), *(part.weights.cpu() for part in parts)])
    return Sparse(Ragged(alignment.source_ids[shared][positions], lengths), weights, alignment.source_size)


def subtoken_mixture(
    alignment: Alignment, source: Tokenizer, target: Tokenizer, tokens: Sequence[int] | None = None
) -> Sparse:
    """Give equal weights to the tokens into which the source splits each new token.

    A token that starts a word is split like a word, and a token that continues a word like the rest of one:
    ``##ing`` becomes ``##in`` and ``##g``, not ``in`` and ``##g``. Special tokens, and tokens that the source
    cannot write, get empty rows.

    Args:
        alignment: Alignment of source and target.
        source: Tokenizer of the source.
        target: Tokenizer of the target.
        tokens: Ids of the target; all new tokens by default.

    Returns:
        One row per token, over the ids of the source; rows add up to 1, or are empty.

    Source: "Bridging Vocabulary Gaps", section 4.2.2, sub-token initialisation.
    """
    ours, theirs = Spelling(source.backend), Spelling(target.backend)
    target_ids = alignment.is_new.nonzero()[:, 0].tolist() if tokens is None else tokens
    rows: list[list[int]] = []
    weights: list[float] = []
    for number in target_ids:
        token = alignment.tokens[number]
        ids = [] if token is None or alignment.special[number] else _split(source, ours, theirs.form(token))
        rows.append(list(dict.fromkeys(ids)))
        weights += [ids.count(subtoken) / len(ids) for subtoken in rows[-1]]
    terms = Ragged.from_rows(rows, dtype=torch.int64)
    return Sparse(terms, torch.tensor(weights, dtype=torch.float32), alignment.source_size)


def mix(mixture: Sparse, rows: Tensor) -> Tensor:
    """Compute weighted sums of the rows of a matrix.

    Args:
        mixture: ``n`` rows over ``V`` terms.
        rows: ``(V, width)``.

    Returns:
        ``(n, width)`` in the dtype of ``rows``; zeros for empty rows of the mixture.

    Source: "Bridging Vocabulary Gaps", equation 9.
    """
    moved = mixture.to(rows.device)
    bags = moved.terms.values, rows.detach().float(), moved.terms.offsets.long()
    mixed = F.embedding_bag(*bags, mode="sum", per_sample_weights=moved.weights, include_last_offset=True)
    return mixed.to(rows.dtype)


def carry_over(
    rows: Tensor, alignment: Alignment, mixture: Sparse, random: torch.Generator | None = None
) -> Tensor:
    """Make the embedding or output matrix of the target from the matrix of the source.

    Args:
        rows: ``(V, width)``, the matrix of the source.
        alignment: Alignment; shared tokens keep their rows bit by bit.
        mixture: One row per new token, over the ids of the source. A token with an empty row starts as the
            mean of the rows of `anchors`, or without any as the mean of all tokens that have no counterpart.
        random: If given, the rows of new tokens are drawn by this generator instead of mixed: from a normal
            distribution with the standard deviation of ``rows``.

    Returns:
        ``(V', width)``.
    """
    rows, new = rows.detach(), alignment.is_new.to(rows.device)
    result = rows[alignment.source_ids.clamp(min=0).to(rows.device)]
    if random is not None:
        drawn = torch.randn(int(new.sum()), rows.shape[1], generator=random)
        result[new] = (drawn * rows.float().std().cpu()).to(rows)
        return result
    averaged = alignment.source_ids[anchors(alignment)]
    if not len(averaged):
        is_shared = torch.isin(torch.arange(alignment.source_size), alignment.source_ids)
        averaged = (~is_shared).nonzero()[:, 0]
    mean = rows[averaged.to(rows.device)].float().mean(0)
    empty = (mixture.terms.lengths == 0).to(rows.device)
    result[new] = torch.where(empty[:, None], mean.to(rows), mix(mixture, rows))
    return result


def align_prior(source: Tensor, target: Tensor) -> Tensor:
    """Rescale the biases of the target to the mean and the deviation of the source.

    Biases of terms that can never have a weight (-10000) do not count on either side, and stay.

    Args:
        source: ``(V,)``, the output bias of the source.
        target: ``(V',)``, biases for the target, such as the logarithms of token frequencies.

    Returns:
        ``(V',)``; the mean of the source everywhere if the target has no deviation.

    Source: "Bridging Vocabulary Gaps", equation 10.
    """
    ours, theirs = (bias[is_allowed(bias)].double() for bias in (source, target))
    spread = theirs.std(correction=0)
    scores = (target.double() - theirs.mean()) / (spread if spread > 0 else 1.0)
    aligned = ours.mean() + ours.std(correction=0) * scores
    return torch.where(is_allowed(target), aligned.to(source.dtype), target.to(source.dtype))


def is_allowed(bias: Tensor) -> Tensor:
    """Return which terms can have a weight, ``(V,)`` bool: the terms that the bias does not exclude."""
    return bias > _EXCLUDED


def count_tokens(texts: Iterable[str], tokenizers: Sequence[tuple[Tokenizer, int]]) -> list[Tensor]:
    """Compute the logarithms of relative token frequencies, with add-one smoothing.

    Args:
        texts: Texts; they are read once.
        tokenizers: Tokenizers, each with the size of its vocabulary.

    Returns:
        ``(size,)`` float32 for each tokenizer. Trained output biases are close to these values.
    """
    stream = iter(texts)
    counts = [torch.ones(size, dtype=torch.float64) for _, size in tokenizers]
    while chunk := list(islice(stream, _TEXTS)):
        for (tokenizer, size), count in zip(tokenizers, counts, strict=True):
            count += torch.bincount(tokenizer(chunk).values, minlength=size)
    return [(count / count.sum()).log().float() for count in counts]


def _split(source: Tokenizer, spelling: Spelling, form: Form) -> list[int]:
    """Return the tokens into which the source splits a form, without the token for the unknown."""
    backend = source.backend
    try:
        text = form.text.decode()
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text).strip().removeprefix("▁")
        form = form._replace(text=text.encode())
    except UnicodeDecodeError:
        pass  # half a character, which can be a token of a byte-level source
    word = spelling.style == "wordpiece"  # this model takes whole words only
    written = spelling.write(form._replace(starts=True) if word else form)
    subtokens = backend.model.tokenize("".join(written.split()) if word else written)
    ids = [subtoken.id for subtoken in subtokens]
    if word and not form.starts and ids:  # the first one continues a word
        inner = backend.token_to_id(spelling.prefix + subtokens[0].value)
        ids[0] = ids[0] if inner is None else inner
    return [number for number in ids if number != source.special_ids.get("unk")]
