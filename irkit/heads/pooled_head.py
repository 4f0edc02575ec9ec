"""One vector per text: pool the tokens, then project and normalise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.config import read_json
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense
from irkit.encoder import AnyEncoder
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads.head import Head, Side, width_after
from irkit.heads.layer_modules import Module, OpenedModel, layer_module, read_layers
from irkit.heads.onnx_graph import NEVER, Graph, add_layers

_LEGACY_POOLING = {  # in the order in which several are put side by side
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLINGS = tuple(_LEGACY_POOLING.values())


class PooledHead(Head):
    """Pools the hidden states of each text to one vector, and puts the vector through layers.

    A text without tokens is pooled to zeros. Pooling and layers run in float32 (or float64), however low the
    precision of the encoder.

    Attributes:
        pooling: Ways of pooling. The results of several ways are concatenated.
        include_prompt: Whether the tokens of the prompt are pooled too.
        layers: Layers after pooling, `Projection` and `Normalize` in any order.
        dim: Width of the vector after the layers.

    Examples:
        >>> tokens = Ragged.from_rows([[101, 7, 102], [101, 102]])
        >>> hidden = tokens.with_values(torch.ones(5, 4))
        >>> PooledHead(4, "mean")(hidden, tokens).values.tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]

    Source: the Pooling module of sentence-transformers, which has the same names for ways of pooling.
    """

    kind: ClassVar[str] = "dense"
    model_type: ClassVar[str] = "SentenceTransformer"

    def __init__(
        self,
        hidden_size: int,
        pooling: str | Sequence[str] = "mean",
        layers: Iterable[nn.Module] = (),
        *,
        include_prompt: bool = True,
    ) -> None:
        """Make a head of a pooling and layers.

        Args:
            hidden_size: Width of the hidden states.
            pooling: cls (first token), max, mean, mean_sqrt_len_tokens (sum divided by the root of the
                number of tokens), weightedmean (token i, from 1, counts i times) or lasttoken, which is the
                end-of-sequence token if the tokenizer puts one behind each text; or several.
            layers: Applied to the pooled vectors in turn.
            include_prompt: False leaves the tokens of the prompt out.

        Raises:
            BadValueError: The pooling is unknown, or the widths of two layers do not meet.
        """
        super().__init__()
        self.pooling = (pooling,) if isinstance(pooling, str) else tuple(pooling)
        self.include_prompt = include_prompt
        self.layers = nn.ModuleList(layers)
        self.hidden_size = hidden_size
        unknown = sorted(set(self.pooling) - set(POOLINGS))
        if unknown or not self.pooling:
            hint = "; lasttoken is the end token if tokenizer.json puts one behind each text"
            raise BadValueError(
                f"PooledHead: unknown pooling {', '.join(unknown) or '()'}, expected {', '.join(POOLINGS)}"
                + (hint if "eos" in unknown else "")
            )
        self.dim = width_after(self.layers, hidden_size * len(self.pooling), "PooledHead")

    def settings(self) -> dict[str, Any]:
        """Return ``pooling`` and ``include_prompt``, the arguments of the constructor except the layers."""
        return {"pooling": list(self.pooling), "include_prompt": self.include_prompt}

    @classmethod
    def from_modules(cls, opened: OpenedModel) -> Self:
        """Make the head from a Pooling module, then Dense and Normalize modules in any order.

        Raises:
            ConfigError: There is another module.
            CorruptError: Pooling expects another width than the hidden states have.
        """
        modules, hidden_size, folder = opened.modules, opened.encoder.hidden_size, opened.folder
        if not modules or modules[0][0] != "Pooling":
            first = modules[0][0] if modules else "nothing"
            name = "config_sentence_transformers.json"
            missing = f"; {name} is missing, without which it is taken for a dense model"
            hint = "" if (folder / name).exists() else missing
            raise ConfigError(f"loading {folder}: Transformer is followed by {first}, expected Pooling{hint}")
        layers = read_layers(modules[1:], "sentence_embedding")
        settings = read_json(modules[0][1] / "config.json")
        width = settings.get("embedding_dimension", settings.get("word_embedding_dimension", hidden_size))
        if width != hidden_size:
            raise CorruptError(
                f"loading {folder}: Pooling expects width {width}, the encoder gives {hidden_size}"
            )
        legacy = [mode for key, mode in _LEGACY_POOLING.items() if settings.get(key)]
        pooling = settings.get("pooling_mode") or legacy or "mean"
        return cls(hidden_size, pooling, layers, include_prompt=settings.get("include_prompt", True))

    def to_modules(self, encoder: AnyEncoder) -> list[Module]:
        """Return the modules to write: Pooling, then the layers.

        Pooling has the keys of version 2 of sentence-transformers unless only version 6 can express it.
        """
        pooling: dict[str, Any] = {key: mode in self.pooling for key, mode in _LEGACY_POOLING.items()}
        if [mode for mode in _LEGACY_POOLING.values() if mode in self.pooling] != list(self.pooling):
            pooling = {"pooling_mode": list(self.pooling)}  # only version 6 knows another order
        common = {"word_embedding_dimension": self.hidden_size, "include_prompt": self.include_prompt}
        layers = [layer_module(layer) for layer in self.layers]
        return [("sentence_transformers.models.Pooling", common | pooling, {}), *layers]

    def pooling_problem(self) -> str | None:
        """Return why the head cannot work on an encoder that pools; None if it can."""
        if self.include_prompt:
            return None
        return "its head leaves the tokens of the prompt out, which pooled rows hold together with others"

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Dense:
        """Pool the hidden states of each text to one vector.

        Args:
            hidden: Ragged ``(total, hidden_size)``; a pooling encoder gives fewer rows than tokens.
            tokens: Ignored.
            prompt_length: Number of leading tokens of each text that belong to the prompt.
            side: Ignored: both sides are pooled alike.

        Returns:
            Dense ``(n, dim)`` float32.
        """
        skipped = 0 if self.include_prompt else prompt_length
        hidden = hidden.with_values(hidden.values.to(torch.promote_types(hidden.values.dtype, torch.float32)))
        if skipped:
            lengths = (hidden.lengths - skipped).clamp(min=0)
            positions = hidden.part_positions(hidden.lengths - lengths, lengths)
            hidden = positions.with_values(hidden.values[positions.values])
        return Dense(self.apply_layers(torch.cat([_pool(mode, hidden, skipped) for mode in self.pooling], 1)))

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def to_onnx(self, graph: Graph, hidden: str, ids: str, mask: str) -> str:
        """Add pooling and layers to an ONNX graph; return the name of the vectors ``(batch, dim)``."""
        seen = graph("Unsqueeze", graph("Cast", mask, to=1), graph.ints(2))
        count = graph("ReduceSum", seen, graph.ints(1), keepdims=0)
        least = graph("Max", count, graph.floats(1))
        inside = graph("Mul", hidden, seen)
        vectors = []
        for mode in self.pooling:
            if mode in ("cls", "lasttoken"):
                last = graph("Cast", graph("Sub", least, graph.floats(1)), to=7)
                position = last if mode == "lasttoken" else graph("Mul", last, graph.ints(0))
                row = graph("GatherND", inside, position, batch_dims=1)
            elif mode == "max":
                lowered = graph("Mul", graph("Sub", graph.floats(1), seen), graph.floats(NEVER))
                row = graph("ReduceMax", graph("Add", inside, lowered), axes=[1], keepdims=0)
            else:
                weights = seen
                if mode == "weightedmean":
                    weights = graph("Mul", graph("CumSum", seen, graph.constant(np.array(1))), seen)
                total = graph("ReduceSum", graph("Mul", inside, weights), graph.ints(1), keepdims=0)
                weight = graph("ReduceSum", weights, graph.ints(1), keepdims=0)
                divisor = graph("Sqrt", least) if "sqrt" in mode else graph("Max", weight, graph.floats(1))
                row = graph("Div", total, divisor)
            vectors.append(row)
        joined = vectors[0] if len(vectors) == 1 else graph("Concat", *vectors, axis=-1)
        return add_layers(graph, self.layers, joined)

    def extra_repr(self) -> str:
        """Return what a printed head says beside its layers."""
        return f"pooling={'+'.join(self.pooling)}, include_prompt={self.include_prompt}"


def _pool(mode: str, hidden: Ragged, skipped: int) -> Tensor:
    """Pool the tokens of each row: ``(total, hidden_size)`` to ``(n, hidden_size)``; empty rows give zeros.

    Args:
        mode: Way of pooling, see `PooledHead`.
        hidden: Hidden states to pool.
        skipped: Number of tokens of a prompt that were removed from the start of each row.
    """
    if mode == "mean_sqrt_len_tokens":
        counts = hidden.offsets.diff().clamp(min=1)
        return _bag("sum", hidden) / counts.sqrt()[:, None]
    if mode == "weightedmean":
        weights = (hidden.positions() + skipped + 1).to(hidden.values.dtype)[:, None]
        total = _bag("sum", hidden.with_values(weights))
        return _bag("sum", hidden.with_values(hidden.values * weights)) / total.clamp(min=1)
    if mode in ("cls", "lasttoken"):
        starts, ends = hidden.offsets[:-1], hidden.offsets[1:]
        zeros = len(hidden.values)  # the place of a row of zeros, added for texts without tokens
        chosen = torch.where(ends > starts, starts if mode == "cls" else ends - 1, zeros)
        return F.pad(hidden.values, (0, 0, 0, 1))[chosen.long()]
    return _bag(mode, hidden)


def _bag(mode: str, rows: Ragged) -> Tensor:
    """Return the sum, mean or max (``mode``) of each row, ``(n, width)``; an empty row gives zeros."""
    positions = torch.arange(len(rows.values), device=rows.device, dtype=torch.int32)
    return F.embedding_bag(positions, rows.values, rows.offsets, mode=mode, include_last_offset=True)
