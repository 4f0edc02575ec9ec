"""Where tokens that a model has never seen begin: mixtures of rows that it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.config import Config
from irkit.errors import BadValueError
from irkit.ragged import Ragged
from irkit.representation import Sparse
from irkit.tokenizer import Tokenizer
from irkit.vocabulary.alignment import Alignment, Form, Spelling
from irkit.vocabulary.simplex import sparsemax

__all__ = [
    "TransferConfig",
    "align_prior",
    "anchors",
    "carry_over",
    "count_tokens",
    "is_allowed",
    "mix",
    "semantic_mixture",
    "subtoken_mixture",
]

_SCORES = 2**24  # similarities held at once, 64 MB
_TEXTS = 1024  # tokenised at once
_EXCLUDED = -5000.0  # biases below are those of terms that never have a weight


class TransferConfig(Config):
    """How a model is moved onto another vocabulary.

    Attributes:
        initialization: Of new tokens: ``"semantic"``, mixtures of the shared tokens near them in the space
            of the target's embeddings; ``"subtoken"``, the mean of the tokens that the source makes of them;
            ``"mean"``, that of all shared tokens; ``"random_new"``; or ``"random_all"``, which forgets the
            shared tokens too. ``"auto"`` is semantic where the target has embeddings, else subtoken.
        bias: Of the output: ``"prior"`` takes the frequencies of the target vocabulary into the range of the
            source (PDA); ``"copied"`` treats it as the embeddings are treated.
        normalize: Whether tokens also correspond if only case or accents differ, see `align`.
        seed: Of what is random.

    Source: "Bridging Vocabulary Gaps", section 4.2.2 and table 3.
    """

    initialization: Literal["auto", "semantic", "subtoken", "mean", "random_new", "random_all"] = "auto"
    bias: Literal["prior", "copied"] = "prior"
    normalize: bool = False
    seed: int = 0


def anchors(alignment: Alignment) -> Tensor:
    """Ids in the target of the shared tokens that others are compared with: each of the source once.

    Special tokens are none, because they have no meaning to share.
    """
    usable = ~alignment.is_new & ~alignment.special
    ids = usable.nonzero()[:, 0].tolist()
    first = dict(zip(reversed(alignment.source_ids[usable].tolist()), reversed(ids), strict=True))
    return torch.tensor(sorted(first.values()), dtype=torch.int64)


def semantic_mixture(alignment: Alignment, embeddings: Tensor) -> Sparse:
    """Weigh the shared tokens around each new one: sparsemax of cosines in the space of the target.

    Similarities are computed block by block and never held as a whole.

    Args:
        alignment: Of source and target.
        embeddings: ``(V', width)`` of the target.

    Returns:
        A row a new token, over the ids of the source; rows add up to 1.

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
    compared = unit[shared.to(unit.device)].T.contiguous()
    blocks = torch.split(new.to(unit.device), max(1, _SCORES // len(shared)))
    parts = [sparsemax(unit[block] @ compared) for block in blocks]
    lengths = torch.cat([new.new_zeros(0), *(part.terms.lengths for part in parts)])
    places = torch.cat([new.new_zeros(0), *(part.terms.values.cpu() for part in parts)])
    weights = torch.cat([torch.zeros(0), *(part.weights.cpu() for part in parts)])
    return Sparse(Ragged(alignment.source_ids[shared][places], lengths), weights, alignment.source_size)


def subtoken_mixture(
    alignment: Alignment, source: Tokenizer, target: Tokenizer, tokens: Sequence[int] | None = None
) -> Sparse:
    """Weigh the tokens that the source makes of each new token, all alike.

    A token that starts a word is cut as a word, one that continues a word as such: ``##ing`` becomes ``##in``
    and ``##g``, not ``in`` and ``##g``. Special tokens, and what the source cannot write, get empty rows.

    Args:
        alignment: Of source and target.
        source: Tokenizer of the source.
        target: Tokenizer of the target.
        tokens: Ids of the target instead of all new ones.

    Returns:
        A row a token, over the ids of the source; rows add up to 1, or are empty.

    Source: "Bridging Vocabulary Gaps", section 4.2.2, sub-token initialisation.
    """
    ours, theirs = Spelling(source.backend), Spelling(target.backend)
    chosen = alignment.is_new.nonzero()[:, 0].tolist() if tokens is None else tokens
    rows: list[list[int]] = []
    weights: list[float] = []
    for number in chosen:
        token = alignment.tokens[number]
        ids = [] if token is None or alignment.special[number] else _pieces(source, ours, theirs.form(token))
        rows.append(list(dict.fromkeys(ids)))
        weights += [ids.count(piece) / len(ids) for piece in rows[-1]]
    terms = (
        Ragged.from_rows(rows, dtype=torch.int64) if rows else Ragged(torch.zeros(0).long(), torch.zeros(0))
    )
    return Sparse(terms, torch.tensor(weights, dtype=torch.float32), alignment.source_size)


def mix(mixture: Sparse, rows: Tensor) -> Tensor:
    """Sum rows of a matrix by weight.

    Args:
        mixture: ``n`` rows over ``(V, width)``.
        rows: ``(V, width)``.

    Returns:
        ``(n, width)`` in the dtype of ``rows``; zeros where a row of the mixture is empty.

    Source: "Bridging Vocabulary Gaps", equation 9.
    """
    mixed = F.embedding_bag(
        mixture.terms.values.to(rows.device),
        rows.detach().float(),
        mixture.terms.offsets.long().to(rows.device),
        mode="sum",
        per_sample_weights=mixture.weights.to(rows.device),
        include_last_offset=True,
    )
    return mixed.to(rows.dtype)


def carry_over(
    rows: Tensor, alignment: Alignment, mixture: Sparse, random: torch.Generator | None = None
) -> Tensor:
    """The matrix of the target from that of the source.

    Args:
        rows: ``(V, width)`` of the source.
        alignment: Shared tokens keep their rows, bit by bit.
        mixture: Of the new tokens; where it is empty, a token starts as the mean of the anchors.
        random: Draws new tokens instead, from a normal distribution as wide as ``rows``.

    Returns:
        ``(V', width)``.
    """
    rows, new = rows.detach(), alignment.is_new.to(rows.device)
    result = rows[alignment.source_ids.clamp(min=0).to(rows.device)]
    if random is not None:
        drawn = torch.randn(int(new.sum()), rows.shape[1], generator=random)
        result[new] = (drawn * rows.float().std().cpu()).to(rows)
        return result
    mean = rows[alignment.source_ids[anchors(alignment)].to(rows.device)].float().mean(0)
    empty = (mixture.terms.lengths == 0).to(rows.device)
    result[new] = torch.where(empty[:, None], mean.to(rows), mix(mixture, rows))
    return result


def align_prior(source: Tensor, target: Tensor) -> Tensor:
    """Give biases of the target the mean and the deviation that those of the source have.

    Biases of terms that never have a weight (-10000) count on neither side, and stay.

    Args:
        source: ``(V,)`` of the source.
        target: ``(V',)`` of the target, such as logarithms of how often tokens occur.

    Returns:
        ``(V',)``; the mean of the source everywhere if the target has no deviation.

    Source: "Bridging Vocabulary Gaps", equation 10.
    """
    ours, theirs = (each[is_allowed(each)].double() for each in (source, target))
    spread = theirs.std(correction=0)
    scores = (target.double() - theirs.mean()) / (spread if spread > 0 else 1.0)
    aligned = ours.mean() + ours.std(correction=0) * scores
    return torch.where(is_allowed(target), aligned.to(source.dtype), target.to(source.dtype))


def is_allowed(bias: Tensor) -> Tensor:
    """``(V,)`` bool: terms that can have a weight, not excluded by `irkit.heads.SparseHead.exclude_`."""
    return bias > _EXCLUDED


def count_tokens(texts: Iterable[str], tokenizers: Sequence[tuple[Tokenizer, int]]) -> list[Tensor]:
    """Logarithms of how often tokens occur, plus 1 each, as a share of all: what output biases learn.

    Args:
        texts: Read once.
        tokenizers: Each with the size of its vocabulary.

    Returns:
        ``(size,)`` float32 for each tokenizer.
    """
    stream = iter(texts)
    counts = [torch.ones(size, dtype=torch.float64) for _, size in tokenizers]
    while chunk := list(islice(stream, _TEXTS)):
        for (tokenizer, size), count in zip(tokenizers, counts, strict=True):
            count += torch.bincount(tokenizer(chunk).values, minlength=size)
    return [(count / count.sum()).log().float() for count in counts]


def _pieces(source: Tokenizer, spelling: Spelling, form: Form) -> list[int]:
    """What the model of the source makes of a form, without the token for the unknown."""
    backend = source.backend
    try:
        text = form.text.decode()
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text).strip().removeprefix("▁")
        form = form._replace(text=text.encode())
    except UnicodeDecodeError:
        pass  # half a character, of which a byte-level source can have a token
    word = spelling.style == "wordpiece"  # whose model takes whole words only
    written = spelling.write(form._replace(starts=True) if word else form)
    pieces = backend.model.tokenize("".join(written.split()) if word else written)
    ids = [piece.id for piece in pieces]
    if word and not form.starts and ids:
        inner = backend.token_to_id(spelling.prefix + pieces[0].value)
        ids[0] = ids[0] if inner is None else inner
    return [number for number in ids if number != source.special_ids.get("unk")]
