"""The encoder: token ids in, hidden states out, nothing padded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from irkit_kernels.packed_linear import Kind
from torch import Tensor, nn

from irkit.config import read_json
from irkit.core.ragged import Ragged
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.attention import (
    alibi_bias,
    check_lengths,
    distance_rows,
    pick_backend,
    relative_bias,
)
from irkit.encoder.checkpoint_weights import (
    Undrawn,
    export_weights,
    find_prefix,
    import_weights,
    swap_heads,
)
from irkit.encoder.convolution import ConvolutionBlock
from irkit.encoder.encoder_config import Pooling
from irkit.encoder.families import FAMILIES, encoder_config, family_of, schedule_settings
from irkit.encoder.fast_copy import fast_copy, has_fast_copy
from irkit.encoder.layers import Context, Embeddings, Layer
from irkit.encoder.norms import make_norm
from irkit.errors import BadTypeError, ConfigError
from irkit.utils.weights import read_weights, write_weights

_POOLED = "pooled_"  # before the model_type of a family that pools in irkit only


class Encoder(nn.Module):
    """Runs any family of `irkit.encoder.families` on rows of different lengths, without padding.

    Attributes:
        settings: Keys of ``config.json``, as Hugging Face writes them.
        config: The configuration that ``settings`` describe.
        attention: Requested attention backend: auto, eager, sdpa or flash.
        head_weights: Weights of task heads in the checkpoint of the encoder, by their names there.
        prefix: Prefix of the names of the encoder's weights in the checkpoint, such as ``"bert."``.

    Examples:
        >>> settings = {"model_type": "bert", "vocab_size": 99, "hidden_size": 8, "num_hidden_layers": 1,
        ...             "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32,
        ...             "type_vocab_size": 2}
        >>> hidden = Encoder(settings)(Ragged.from_rows([[5, 6, 7], [8]]))
        >>> hidden.values.shape, hidden.lengths.tolist()
        (torch.Size([4, 8]), [3, 1])
    """

    def __init__(self, settings: Mapping[str, Any], *, attention: str = "auto") -> None:
        """Build an encoder of random weights.

        Raises:
            ConfigError: ``settings`` describe an architecture that this class does not have.
        """
        super().__init__()
        if not isinstance(settings, Mapping):
            raise BadTypeError(f"Encoder: got {settings!r:.60}, expected the keys of a config.json")
        # read the settings; an error names the family
        self.family = str(settings.get("model_type")).removeprefix(_POOLED)
        settings = self.settings = {**settings, "model_type": self.family}
        if self.family not in FAMILIES:
            raise ConfigError(
                f"Encoder: model_type {self.family!r} is not one of {', '.join(sorted(FAMILIES))}"
            )
        try:
            self.config = encoder_config(settings)
        except KeyError as error:
            raise ConfigError(
                f"Encoder: the configuration of a {self.family} lacks the key {error}"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"Encoder: a {self.family} with {error} is not supported") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Encoder: the configuration of a {self.family} has a value of the wrong type: {error}"
            ) from error
        # an unknown backend is an error now; flash is checked later, on the device that runs it
        pick_backend(attention if attention != "flash" else "auto", torch.device("cpu"), torch.float32)
        self.attention = attention
        self.head_weights: dict[str, Tensor] = {}
        self.prefix = ""
        # build the modules; each layer reads the width of the layer before
        self.embeddings = Embeddings(self.config)
        relative = self.config.relative
        heads = self.config.layers[0].num_heads
        self.relative = nn.Embedding(relative.buckets, heads) if relative else None
        if apart := self.config.disentangled:
            self.relative = nn.Embedding(2 * apart.span, self.config.hidden_size)
            self.relative_norm = (
                make_norm(self.config, self.config.hidden_size) if apart.norm else nn.Identity()
            )
        beside = self.config.convolution
        self.convolution = ConvolutionBlock(self.config, beside) if beside else None
        sizes = [layer.hidden_size for layer in self.config.layers]
        self.layers = nn.ModuleList(
            Layer(self.config, layer, size)
            for layer, size in zip(self.config.layers, [sizes[0], *sizes], strict=False)
        )
        normed = self.config.norm_location == "post"
        self.final_norm = nn.Identity() if normed else make_norm(self.config, self.config.hidden_size)
        # names in checkpoints, and random weights
        family = family_of(settings)
        self._names = {name: family.checkpoint_names(name) for name, _ in self.named_parameters()}
        self._initialise(float(settings.get("initializer_range", 0.02)))

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: torch.dtype = torch.float32, attention: str = "auto"
    ) -> Encoder | TransformersEncoder:
        """Load a Hugging Face model directory.

        Args:
            directory: Holds ``config.json`` and ``model.safetensors`` (or ``pytorch_model.bin``).
            dtype: Type of the weights in memory.
            attention: auto, eager, sdpa or flash.

        Returns:
            The encoder in evaluation mode. An architecture without a family comes back as a
            `TransformersEncoder`, which runs transformers' own code.

        Raises:
            StorageError: A file is missing.
            CorruptError: The weights do not fit the configuration.
        """
        if not isinstance(directory, str | Path):
            raise BadTypeError(f"Encoder.from_pretrained: got {directory!r:.60}, expected a directory")
        settings = read_json(Path(directory) / "config.json")
        try:  # on "meta", wrong sizes in config.json take no memory
            with torch.device("meta"), Undrawn():
                encoder = cls(settings, attention=attention)
        except ConfigError as reason:
            try:
                return TransformersEncoder.from_pretrained(directory, dtype=dtype, attention=attention)
            except ConfigError as error:
                raise ConfigError(f"{error} ({reason})") from error
        family, names, tensors = family_of(encoder.settings), encoder.names(), read_weights(directory)
        encoder.prefix = find_prefix(tensors, names, family)
        encoder.head_weights = import_weights(encoder, names, family, tensors, str(directory))
        if family.alternating:
            for layer in cast("list[Layer]", encoder.layers):
                layer.qkv.weight.data = swap_heads(layer.qkv.weight.data, layer.layer.num_heads, 3)
        return encoder.to(dtype).eval()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` as transformers reads them.

        If layers of a family without pooling pool, ``model_type`` gets a name that transformers does not
        know. transformers then refuses the directory, instead of leaving the pooling out.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        parameters: dict[str, Tensor] = dict(self.named_parameters())
        settings = self.settings | {
            "dtype": str(next(iter(parameters.values())).dtype).removeprefix("torch.")
        }
        if any(settings.pop("pooling", None) or ()):
            settings |= {"model_type": _POOLED + self.family, "pooling": self.settings["pooling"]}
        if family_of(self.settings).alternating:
            heads = self.config.layers[0].num_heads
            qkv = {name: swap_heads(w, 3, heads) for name, w in parameters.items() if ".qkv." in name}
            parameters |= qkv
        weights = export_weights(parameters, self.names(), self.prefix, self.part_rows())
        write_weights(folder, weights | self.head_weights)
        (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")

    def quantize_(self, kind: Kind = "int8") -> None:
        """Replace the linear maps of all layers by int8 or bfloat16 ones, in place: for inference on the CPU.

        Weights are rounded once, to int8 with a scale per output feature. Inputs are rounded in every call,
        to int8 with a scale per token, so that no calibration on data is needed.
        """
        for layer in self.layers:
            cast(Layer, layer).quantize_(kind)

    def pack_(self) -> None:
        """Lay out the weights of all layers for inference on a CPU, in place; on a GPU do nothing.

        The results are the same up to rounding. The encoder can no longer be trained, saved, moved or copied.
        An encoder that has a `fast_copy` stays as it is: the copy is what runs.
        """
        if has_fast_copy(self):
            return
        for layer in self.layers:
            cast(Layer, layer).pack_()

    def grow_(self, vocab_size: int) -> None:
        """Extend the word embeddings to ``vocab_size`` rows, in place; new rows are the mean of the old rows.

        A smaller ``vocab_size`` changes nothing.
        """
        old = self.word_embeddings.detach()
        if vocab_size > len(old):
            self.set_embeddings_(torch.cat([old, old.mean(0).expand(vocab_size - len(old), -1)]), {})

    def set_embeddings_(self, rows: Tensor, special_ids: Mapping[str, int]) -> None:
        """Replace the values of the word embeddings, in place; a decoder still shares the parameter.

        Weights of task heads over the old vocabulary are dropped.

        Args:
            rows: New word embeddings ``(vocab_size, width)``.
            special_ids: New values of keys of ``config.json``, such as ``pad_token_id``.
        """
        old = self.word_embeddings.shape[:1]  # first dimension of those task heads
        heads = self.head_weights.items()
        self.head_weights = {name: weight for name, weight in heads if weight.shape[:1] != old}
        self.word_embeddings.data, self.embeddings.word.num_embeddings = rows, len(rows)
        self.settings |= {**special_ids, "vocab_size": len(rows)}
        self.config = self.embeddings.config = encoder_config(self.settings)

    def set_pooling_(self, schedule: Sequence[Pooling | None]) -> None:
        """Set which layers pool, in place; weights do not change, and saving writes the schedule.

        Args:
            schedule: Pooling per layer, from the input up; None does not pool.

        Raises:
            ConfigError: The schedule has another number of layers, or config.json of the family cannot
                express it.

        Examples:
            >>> settings = {"model_type": "bert", "vocab_size": 99, "hidden_size": 8, "num_hidden_layers": 2,
            ...             "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32,
            ...             "type_vocab_size": 2}
            >>> encoder = Encoder(settings)
            >>> encoder.set_pooling_([None, Pooling(kernel=2, stride=2)])
            >>> encoder(Ragged.from_rows([[5, 6, 7], [8]])).lengths.tolist()
            [2, 1]

        Source: Schlatt et al. 2025 (TITE), section 3.1.
        """
        settings = self.settings | schedule_settings(self.family, schedule)
        self.config = encoder_config(settings)
        self.settings = settings
        for layer, config in zip(cast("list[Layer]", self.layers), self.config.layers, strict=True):
            layer.config, layer.layer = self.config, config

    def names(self) -> dict[str, tuple[str, ...]]:
        """Map each irkit parameter name to the checkpoint names of the tensors that make it up."""
        return self._names

    def part_rows(self) -> dict[str, tuple[int, ...]]:
        """Map the name of each parameter that joins query, key and value to their numbers of rows."""
        rows = {
            f"layers.{i}.qkv.{kind}": layer.projections
            for i, layer in enumerate(self.config.layers)
            for kind in ("weight", "bias")
        }
        return {name: rows[name] for name in self._names if name in rows}

    @property
    def max_positions(self) -> int | None:
        """Longest row that the position embeddings allow; None is any length."""
        return self.config.max_positions

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.config.hidden_size

    @property
    def word_embeddings(self) -> nn.Parameter:
        """The matrix ``(vocab_size, width)`` with a row for each token."""
        return cast(nn.Parameter, self.embeddings.word.weight)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(  # noqa: D102
            self, tokens: Ragged, attended: Tensor | None = None, pooled: bool = True
        ) -> Ragged: ...

    def forward(self, tokens: Ragged, attended: Tensor | None = None, pooled: bool = True) -> Ragged:
        """Encode token ids to hidden states.

        Args:
            tokens: Ragged int64 ``(total,)``.
            attended: ``(n,)`` number of leading tokens per row that are attended to, at least 1. The other
                tokens attend to these tokens, but no token attends to the others. None is all.
            pooled: False switches the pooling of layers off.

        Returns:
            Hidden states of the last layer, Ragged ``(total', hidden_size)``: one per token, or fewer if
            layers pool. An encoder that pools texts to one hidden state leaves several of a text that is
            longer than its schedule was made for.

        Raises:
            BadValueError: A row is longer than the position embeddings.
            IndexError: An id is outside the vocabulary.
        """
        check_lengths(tokens, self.max_positions)
        if (fast := fast_copy(self)) is None:
            return self._encode(tokens, attended, pooled)
        hidden = fast._encode(tokens, attended, pooled)
        return hidden.with_values(hidden.values.to(self.word_embeddings.dtype))

    def _encode(self, tokens: Ragged, attended: Tensor | None, pooled: bool) -> Ragged:
        x = self.embeddings(tokens).values
        backend = pick_backend(self.attention, x.device, x.dtype)
        bias = None
        if self.relative is not None and self.config.relative is not None:
            furthest = self.config.relative.furthest
            bias = relative_bias(self.relative.weight, furthest, max(tokens.max_length, 1))
        if self.config.alibi:
            heads = self.config.layers[0].num_heads
            bias = alibi_bias(heads, max(tokens.max_length, 1), x.device).to(x.dtype)
        context = Context(tokens, backend, attended, pooled, bias, self.relative_positions(tokens.max_length))
        embedded = x
        for number, layer in enumerate(self.layers):
            x, context = layer(x, context)
            if self.convolution is not None and number == 0:
                x = self.convolution(embedded, x, context)
        return context.rows.with_values(self.final_norm(x))

    def relative_positions(self, longest: int) -> tuple[Tensor, Tensor] | None:
        """Return the embeddings of relative positions that rows of up to ``longest`` tokens need.

        Returns:
            Embeddings ``(rows, hidden_size)``, normalised if configured, and the number of the row of each
            distance, see `PositionTerms`; None if the encoder has no such embeddings.
        """
        settings = self.config.disentangled
        if settings is None or self.relative is None:
            return None
        rows = distance_rows(settings, min(max(longest, 1), settings.furthest + 1))
        first, last, table = int(rows[0]), int(rows[-1]), self.relative.weight
        return self.relative_norm(table[first : last + 1]), (rows - first).to(table.device)

    def _initialise(self, deviation: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
                nn.init.zeros_(module.bias)
