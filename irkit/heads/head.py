"""`Head`, the base of all heads: a head turns the hidden states of a text into its representation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from irkit.arguments import brief
from irkit.config import Config, read_json
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, Representation, Sparse
from irkit.encoder import AnyEncoder
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads.layer_modules import Module, OpenedModel
from irkit.heads.onnx_graph import Graph
from irkit.heads.projection import Normalize, Projection
from irkit.tokenizer import Tokenizer
from irkit.utils.weights import read_weights

Side = Literal["query", "document"]


class Head(nn.Module):
    """Turns the hidden states of the tokens of each text into one representation.

    A subclass sets ``kind``, ``dim`` and ``layers``, and defines `forward` and `settings`. All else has a
    default. It is registered in `irkit.heads.HEADS`, or by another package as an entry point.

    Attributes:
        kind: Kind of the representations: ``"dense"``, ``"multi_vector"`` or ``"sparse"``.
        model_type: Class of sentence-transformers that opens models with this head; ``"irkit"`` if no class
            does.
        transformer_type: Type of the first module, the Transformer, in modules.json.
        transformer_task: Task of the Transformer in sentence_bert_config.json.
        dim: Width of a vector, or size of the vocabulary.
        layers: Layers that vectors go through, `Projection` and `Normalize` in any order.
        lengths: For each side, the number of tokens at which its texts are cut, special tokens included.
            The tokenizer cuts texts of a side that is missing.
        window: Kernel and stride, in tokens, of the windows that a pooling encoder makes one row of.
        config: Configuration of the head, if it has one.
        include_prompt: Whether the representation depends on the tokens of the prompt.
        vocabulary: Terms of a sparse head, unless they are the tokens of the tokenizer.
        similarities: For heads in ``parts``, the name of the similarity of their representations; a missing
            name stands for the default of the kind.
    """

    kind: ClassVar[str]
    config: Config | None = None
    include_prompt: bool = True
    model_type: ClassVar[str] = "irkit"
    transformer_type: ClassVar[str] = "sentence_transformers.models.Transformer"
    transformer_task: ClassVar[str] = "feature-extraction"
    dim: int
    layers: nn.ModuleList
    lengths: Mapping[Side, int] = MappingProxyType({})
    window: tuple[int, int] = (1, 1)
    vocabulary: tuple[str, ...] | None = None
    similarities: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def create(
        cls, encoder: AnyEncoder, tokenizer: Tokenizer, config: Mapping[str, Any] | Config | None = None
    ) -> Self:
        """Make a new head, with random weights, for an encoder.

        By default the constructor of the class gets the hidden size, and ``config`` as keyword arguments.

        Raises:
            ConfigError: The head takes no such settings, or `settings` does not return them.
        """
        settings = dict(config or {})
        try:
            head = cls(encoder.hidden_size, **settings)
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from error
        if lost := settings.keys() - head.settings().keys():
            raise ConfigError(
                f"{cls.__name__}: settings() does not return {', '.join(sorted(lost))}, so a saved model "
                "would lose them; return all settings of the constructor"
            )
        return head

    def settings(self) -> dict[str, Any]:
        """Return the ``config`` from which `create` makes the head again, without its weights.

        All values can be written as JSON.
        """
        return {}

    @classmethod
    def from_modules(cls, opened: OpenedModel) -> Self:
        """Make the head from the modules that `to_modules` gave, read from a model directory."""
        (_, folder), *_ = opened.modules
        settings = read_json(folder / "config.json")
        settings.pop("head", None)
        head = cls.create(opened.encoder, opened.tokenizer, settings)
        if head.state_dict():
            try:
                head.load_state_dict(read_weights(folder))
            except RuntimeError as error:  # weights of other shapes or names
                raise CorruptError(f"loading {folder}: {' '.join(str(error).split())}") from error
        return head

    def to_modules(self, encoder: AnyEncoder) -> list[Module]:
        """Return the modules to write after the Transformer in a directory of sentence-transformers.

        Each is a type, the settings for its config.json, and its weights by name.
        """
        return [("irkit.Head", self.settings(), self.state_dict())]

    def save_encoder(self, encoder: AnyEncoder, folder: Path) -> None:
        """Write the encoder to a folder.

        A subclass whose head is part of a transformers model writes the head to the folder too.
        """
        encoder.save_pretrained(folder)

    def transformer_settings(self) -> dict[str, Any]:
        """Return the keys of sentence_bert_config.json that hold the lengths of the sides."""
        return {f"{side}_length": length for side, length in self.lengths.items()}

    def read_lengths(self, lengths: Mapping[Side, int]) -> None:
        """Set `lengths` to those that sentence_bert_config.json names."""
        self.lengths = lengths

    def directory_settings(self, queries: Head) -> dict[str, Any]:
        """Return the keys of config_sentence_transformers.json that belong to the head; none by default.

        Args:
            queries: Head of queries; the head itself if the model has one head for both sides.
        """
        return {}

    def to_onnx(self, graph: Graph, hidden: str, ids: str, mask: str) -> str:
        """Add the head to an ONNX graph and return the name of what it makes.

        A multi-vector head makes ``(batch, length, dim)``, any other head ``(batch, dim)``. The function
        `irkit.heads.onnx_graph.add_layers` adds ``layers``.

        Args:
            graph: Gets the operations.
            hidden: Hidden states, float32 ``(batch, length, hidden_size)``, padded at the end.
            ids: Token ids, int64 ``(batch, length)``.
            mask: int64 ``(batch, length)``, 1 for tokens and 0 for padding.

        Raises:
            BadValueError: The head does not override this method, or the graph cannot express its settings.
        """
        raise BadValueError(
            f"exporting to ONNX: the head is a {type(self).__name__}, whose class does not define to_onnx; "
            "expected one that does, such as a dense, multi-vector or sparse head of irkit"
        )

    def onnx_settings(self) -> dict[str, Any]:
        """Return what users of the ONNX file need to know of the head, as JSON; nothing by default."""
        return {}

    @property
    def parts(self) -> Mapping[str, Head]:
        """Return the heads that the head consists of, by name; none if it is one head."""
        return {}

    def chosen(self, names: Iterable[str]) -> Head:
        """Return a head of some of the heads in ``parts``, in the order of ``names``.

        The result shares all parameters.

        Raises:
            BadValueError: The head has no parts, or ``names`` is empty or names an unknown one.
        """
        raise BadValueError(f"encode: heads {brief(names)} of a model with one head; leave heads out")

    @property
    def unit(self) -> bool:
        """Return True if the layers end in vectors of length 1."""
        return bool(self.layers) and isinstance(self.layers[-1], Normalize)

    @property
    def pooled_sides(self) -> tuple[Side, ...] | None:
        """Return the sides on which the pooling layers of an encoder work; None means both."""
        return None

    def pools(self, side: Side) -> bool:
        """Return True if the pooling layers of an encoder work on texts of ``side``."""
        return self.pooled_sides is None or side in self.pooled_sides

    def pooling_problem(self) -> str | None:
        """Return why the head cannot work on an encoder that pools; None if it can."""
        return None

    def max_length(self, side: Side) -> int | None:
        """Return the number of tokens at which texts of ``side`` are cut; None leaves it to the tokenizer."""
        return self.lengths.get(side)

    def set_length(self, side: Side, length: int) -> None:
        """Cut texts of ``side`` at ``length`` tokens."""
        self.lengths = {**self.lengths, side: length}

    def look_up_words(self, tokenizer: Tokenizer) -> None:
        """Look up, and keep, the ids of the words that the configuration names; does nothing by default.

        The constructor of a model calls this.
        """

    def match_width(self, dim: int) -> None:
        """Set the width of query vectors to ``dim``, the width of document vectors, if no result changes.

        A model calls this on its head of queries. Does nothing by default.
        """

    def limited(self, max_active_dims: int) -> Self:
        """Return a copy of a sparse head that keeps the ``max_active_dims`` highest weights per text.

        The copy shares all parameters.

        Raises:
            BadValueError: The head is not sparse.
        """
        raise BadValueError(f"encode: max_active_dims does nothing for a {self.kind} model; leave it out")

    def expand(self, tokens: Ragged, side: Side) -> tuple[Ragged, Tensor | None]:
        """Return the input of the encoder for texts of ``side``; by default ``tokens`` and None.

        Returns:
            Ragged ids; and ``(n,)`` numbers of leading tokens that are attended to, None for all tokens.
        """
        return tokens, None

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Representation:
        """Make one representation of each text.

        Args:
            hidden: Ragged ``(total, hidden_size)``, the encoder's output for ``tokens``. A pooling encoder
                gives fewer hidden states than tokens.
            tokens: Ragged ids, as `expand` gives them.
            prompt_length: Number of leading tokens of each text that belong to the prompt.
            side: Side of the texts.
        """
        raise NotImplementedError

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def for_training(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Representation:
        """Make what losses compare, see `forward`; sparse weights become Dense ``(n, vocabulary)``."""
        representation = self(hidden, tokens, prompt_length, side)
        return Dense(representation.to_dense()) if isinstance(representation, Sparse) else representation

    def apply_layers(self, values: Tensor) -> Tensor:
        """Return ``values (total, width)`` after all layers, in float32 or, for float64 values, float64."""
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        with torch.autocast(values.device.type, enabled=False):  # which a training in bfloat16 has on
            for layer in self.layers:
                values = layer(values)
        return values


def width_after(layers: Iterable[nn.Module], width: int, name: str) -> int:
    """Compute the width of the vectors that leave ``layers`` if vectors of ``width`` enter.

    Raises:
        BadValueError: A layer takes another width than the layer before gives. The message begins with
            ``name``.
    """
    for layer in layers:
        if isinstance(layer, Projection):
            if layer.linear.in_features != width:
                raise BadValueError(
                    f"{name}: a projection takes vectors of width {layer.linear.in_features}, "
                    f"but what precedes it gives {width}"
                )
            width = layer.linear.out_features
    return width
