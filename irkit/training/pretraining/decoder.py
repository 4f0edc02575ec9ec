"""The decoder of masked auto-encoding: one layer that tells tokens from the vector of their text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.encoder import Encoder
from irkit.encoder.attention import rotary_table, rotate
from irkit.encoder.layers import Embeddings, Layer, make_norm
from irkit.errors import BadValueError
from irkit.ragged import Ragged

__all__ = ["Decoder", "visible_tokens"]

_TEXTS = 16  # of about the same length, whose attention is computed at once, padded


class Decoder(nn.Module):
    """Enhanced decoding: each token of a text is to be told from the vector of the text and other tokens.

    There are two streams. Queries are the vector of the text with a position each; keys and values are that
    vector and the embeddings of the tokens. Each query sees the vector and a random part of the tokens, of
    its own, but never the one that it stands for.

    Attributes:
        mask_rate: Share of the other tokens that a query does not see.
        seed: Of what it sees.
        layer: Attention and feed-forward block as in the last layer of the encoder, without pooling.

    Source: Xiao et al. 2022, "RetroMAE", section 3.3; Schlatt et al. 2025 (TITE), section 3.3.
    """

    def __init__(self, encoder: Encoder, mask_rate: float = 0.5, seed: int = 0) -> None:
        """Make one of random weights that goes with an encoder, whose embeddings it shares.

        Raises:
            BadValueError: Word embeddings are not as wide as vectors, or the encoder has no positions.
        """
        super().__init__()
        config, width = encoder.config, encoder.word_embeddings.shape[1]
        bases = [layer.rotary_base for layer in reversed(config.layers) if layer.rotary_base is not None]
        problem = None
        if width != config.hidden_size:
            problem = (
                f"word embeddings are {width} wide and vectors {config.hidden_size}; a composed embedding "
                "(embedding_size) makes them alike"
            )
        elif not bases and not config.learned_positions:
            problem = (
                "the encoder has neither learned nor rotary positions, so that it could not tell tokens apart"
            )
        if problem:
            raise BadValueError(f"masked auto-encoding: {problem}")
        self.mask_rate, self.seed, self.config = mask_rate, seed, config
        changed = {
            "pooling": None,
            "window": None,
            "attention_norm": True,
            "rotary_base": next(iter(bases), None),
        }
        self.layer = Layer(config, config.layers[-1].model_copy(update=changed), config.hidden_size)
        self.embedding_norm = make_norm(config, width) if config.embedding_size else None
        post = config.norm_location == "post"
        self.final_norm = nn.Identity() if post else make_norm(config, config.hidden_size)

    def forward(self, embeddings: Embeddings, vectors: Tensor, tokens: Ragged, numbers: Tensor) -> Tensor:
        """Hidden states from which the tokens can be told.

        Args:
            embeddings: Of the encoder.
            vectors: ``(n, hidden_size)``, one of each text.
            tokens: Ragged ids ``(total,)``, nothing hidden.
            numbers: ``(n,)`` of the texts, which decide who sees what.

        Returns:
            ``(total, hidden_size)``.
        """
        keys, positions = self._embed(embeddings, tokens)
        vectors = vectors.to(keys.dtype)
        queries = vectors[tokens.row_ids()]
        if positions is not None:
            queries = self._norm(embeddings)(queries + positions)
        attended = self._attend(queries, keys, vectors, tokens, numbers)
        result: Tensor = self.final_norm(self.layer.after_attention(queries, attended))
        return result

    def _norm(self, embeddings: Embeddings) -> nn.Module:
        return embeddings.norm if self.embedding_norm is None else self.embedding_norm

    def _embed(self, embeddings: Embeddings, tokens: Ragged) -> tuple[Tensor, Tensor | None]:
        """Tokens in the width of vectors, and their learned positions."""
        x, positions = embeddings.word(tokens.values), None
        if embeddings.position is not None:
            positions = embeddings.position(tokens.positions() + self.config.position_offset)
            x = x + positions
        if embeddings.token_type is not None:
            x = x + embeddings.token_type.weight[0]
        return embeddings.dropout(self._norm(embeddings)(x)), positions

    def _attend(
        self, queries: Tensor, keys: Tensor, vectors: Tensor, tokens: Ragged, numbers: Tensor
    ) -> Tensor:
        """``(total, hidden_size)``: texts of about the same length are padded and go together."""
        layer, parts, order = self.layer, [], []
        (q,), (k, v), (first_k, first_v) = (
            [
                torch.unflatten(part, 1, (layer.layer.num_heads, -1))
                for part in layer._project(values, first, last)
            ]
            for values, first, last in ((queries, 0, 1), (keys, 1, 3), (vectors, 1, 3))
        )
        if layer.layer.rotary_base is not None:
            table = rotary_table(tokens.positions(), layer.layer.rotary_base, q.shape[-1])
            q, k = (rotate(part, table, self.config.rotary_interleaved) for part in (q, k))
        everywhere = tokens.with_values(torch.arange(len(q), device=q.device))
        for rows in torch.split(tokens.lengths.argsort(stable=True), _TEXTS):
            places, real = everywhere[rows].to_padded()
            seen = visible_tokens(
                numbers[rows.to(numbers.device)], places.shape[1], self.mask_rate, self.seed
            )
            seen = F.pad(seen & real[:, None], (1, 0), value=True)
            those = rows.to(q.device)
            found = F.scaled_dot_product_attention(
                q[places].transpose(1, 2),
                torch.cat([first_k[those, None], k[places]], 1).transpose(1, 2),
                torch.cat([first_v[those, None], v[places]], 1).transpose(1, 2),
                attn_mask=seen[:, None],
            )
            parts.append(found.transpose(1, 2)[real])
            order.append(places[real])
        return torch.cat(parts)[torch.cat(order).argsort()].flatten(1)


def visible_tokens(numbers: Tensor, length: int, mask_rate: float, seed: int = 0) -> Tensor:
    """Which tokens each token of a text sees, drawn anew for each of them; none sees itself.

    The draw of a pair is a hash of the seed, the number of the text and both positions: it is the same on
    every device, in every batch, and after training was resumed.

    Args:
        numbers: ``(n,)`` int64 of the texts.
        length: Of each.
        mask_rate: Share that is not seen.
        seed: Of the draws.

    Returns:
        ``(n, length, length)`` bool, true where the second sees the third.
    """
    i = torch.arange(length, device=numbers.device)
    key = _mix(numbers ^ _mix(torch.tensor(seed, device=numbers.device)))
    x = key[:, None, None] + i[:, None] * _STEPS[0] + i * _STEPS[1]
    seen = (_mix(x) >> 32) >= round(mask_rate * 2**32) - 2**31
    seen.diagonal(dim1=1, dim2=2).fill_(False)
    return seen


_STEPS = (-7046029254386353131, 7664345821815920749)  # odd: different places have different products


def _mix(x: Tensor) -> Tensor:
    """A permutation of int64 whose bits look random; products wrap around. Source: splitmix64."""
    for bits, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))) * factor  # the shift of unsigned numbers
    return x
