"""The decoder of masked auto-encoding: one layer that predicts tokens from the vector of their text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.encoder.layers import Embeddings, Layer
from irkit.encoder.norms import make_norm
from irkit.encoder.rotary import rotary_table, rotate
from irkit.errors import BadValueError


class Decoder(nn.Module):
    """Enhanced decoding: predict each token of a text from the vector of the text and other tokens.

    There are two streams. A query per token is the vector of the text plus the position of the token. Keys
    and values are the vector of the text and the embeddings of the tokens. Each query sees the vector and its
    own random part of the tokens, but never the token that it predicts.

    Attributes:
        mask_rate: Share of the other tokens that a query does not see.
        seed: Seed of the visible tokens.
        texts: Number of texts of similar length whose attention is computed together, padded.
        layer: Attention and feed-forward block like the last layer of the encoder, without pooling.

    Source: Xiao et al. 2022, "RetroMAE", section 3.3; Schlatt et al. 2025 (TITE), section 3.3.
    """

    def __init__(self, encoder: Encoder, mask_rate: float = 0.5, seed: int = 0) -> None:
        """Make a decoder of random weights, which shares the embeddings of an encoder.

        Raises:
            BadValueError: Word embeddings and hidden states have different widths, or the encoder has no
                positions.
        """
        super().__init__()
        config, width = encoder.config, encoder.word_embeddings.shape[1]
        # encoders that the decoder cannot be made for
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
        if (
            config.causal
            or config.relative
            or config.alibi
            or config.disentangled
            or config.convolution
            or config.head_norm
            or config.norm_location == "both"
        ):
            problem = (
                f"irkit has no decoder for a {encoder.family}; expected one that is made like BERT or TITE"
            )
        if problem:
            raise BadValueError(f"masked auto-encoding: {problem}")
        # one layer like the last of the encoder, without pooling and window
        self.mask_rate, self.seed, self.config, self.texts = mask_rate, seed, config, 16
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
        """Compute the hidden states from which the tokens are predicted.

        Args:
            embeddings: Embeddings of the encoder.
            vectors: ``(n, hidden_size)``, one vector per text.
            tokens: Ragged ids ``(total,)`` without hidden tokens.
            numbers: ``(n,)`` numbers of the texts, which decide what each token sees.

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
        """Embed tokens like the encoder does.

        Returns:
            The embeddings ``(total, hidden_size)``. And their position embeddings of the same shape, which
            the first value already includes; None if the encoder does not learn positions.
        """
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
        """Return the attention output ``(total, hidden_size)``; texts of similar length form a batch."""
        # heads of the queries, and of the keys and values of tokens and of the vector
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
        positions = tokens.with_values(torch.arange(len(q), device=q.device))
        for rows in torch.split(tokens.lengths.argsort(stable=True), self.texts):
            padded, real = positions[rows].to_padded()
            visible = visible_tokens(
                numbers[rows.to(numbers.device)], padded.shape[1], self.mask_rate, self.seed
            )
            visible = F.pad(visible & real[:, None], (1, 0), value=True)  # everyone sees the vector
            texts = rows.to(q.device)
            attended = F.scaled_dot_product_attention(
                q[padded].transpose(1, 2),
                torch.cat([first_k[texts, None], k[padded]], 1).transpose(1, 2),
                torch.cat([first_v[texts, None], v[padded]], 1).transpose(1, 2),
                attn_mask=visible[:, None],
            )
            parts.append(attended.transpose(1, 2)[real])
            order.append(padded[real])
        return torch.cat(parts)[torch.cat(order).argsort()].flatten(1)


def visible_tokens(numbers: Tensor, length: int, mask_rate: float, seed: int = 0) -> Tensor:
    """Draw which other tokens of its text each token sees.

    The draw of a pair is a hash of the seed, the number of the text and both positions. So it is the same on
    every device, in every batch, and after a resume.

    Args:
        numbers: ``(n,)`` int64 numbers of the texts.
        length: Length of the padded texts.
        mask_rate: Share of the tokens that are not visible.
        seed: Seed of the draws.

    Returns:
        ``(n, length, length)`` bool: ``[:, i, j]`` is True where token i sees token j; never where i = j.
    """
    i = torch.arange(length, device=numbers.device)
    key = _mix(numbers ^ _mix(torch.tensor(seed, device=numbers.device)))
    x = key[:, None, None] + i[:, None] * _STEPS[0] + i * _STEPS[1]
    visible = (_mix(x) >> 32) >= round(mask_rate * 2**32) - 2**31
    visible.diagonal(dim1=1, dim2=2).fill_(False)
    return visible


_STEPS = (-7046029254386353131, 7664345821815920749)  # odd: different positions have different products


def _mix(x: Tensor) -> Tensor:
    """Permute int64 so that bits look random; products wrap around. Source: splitmix64."""
    for bits, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))) * factor  # a shift of unsigned numbers
    return x
