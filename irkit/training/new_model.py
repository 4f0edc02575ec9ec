"""A model that begins with random weights: the encoder of a preset, and a vocabulary."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, PositiveInt, field_validator, model_validator

from irkit.config import Config
from irkit.encoder import Encoder
from irkit.encoder.presets import EncoderSizes, tite_settings
from irkit.errors import ConfigError
from irkit.heads import HEADS, Side
from irkit.model import Model
from irkit.model.hub import local_directory
from irkit.tokenizer import Tokenizer
from irkit.training.domain_vocabulary import DomainConfig

Attention: TypeAlias = Literal["auto", "eager", "sdpa", "flash"]


class Lengths(Config):
    """Numbers of tokens to which the texts of each side are cut."""

    query_length: PositiveInt | None = None
    document_length: PositiveInt | None = None


class NewModel(Lengths):
    """A dense model on an encoder of random weights.

    Attributes:
        kind: How the model is made.
        preset: Preset of `irkit.encoder.presets.tite_settings`: ``2-late``, or its number in table 3 of the
            paper, 1; ``bert-base`` is the same encoder without pooling.
        variant: ``paper``, or ``released`` for an encoder like the authors' checkpoints.
        sizes: Sizes of the encoder; by default as in BERT-base.
        tokenizer: Directory or name of a tokenizer or of a model; or how to train one on the texts of
            ``pretraining``, which `irkit pretrain` does.
        vector: ``cls``, the first row of the encoder, or ``mean``, the mean of all rows. None stands for
            ``mean`` if a layer of the encoder pools, because one row is left then, and for ``cls`` otherwise.
        attention: Implementation of attention: auto, eager, sdpa or flash.
        similarity: cosine or dot.
        prompts: Text that is put in front of every text of a side; the keys are ``query`` and ``document``.
        query_length: Queries are cut to this number of tokens; None cuts them at ``sizes.max_length``.
        document_length: Documents are cut to this number of tokens; None cuts them at ``sizes.max_length``.

    Source: TITE, sections 3.1, 3.2 and 4.1.
    """

    kind: Literal["new"]
    preset: str
    variant: Literal["paper", "released"] = "paper"
    sizes: EncoderSizes = EncoderSizes()
    tokenizer: str | DomainConfig
    vector: Literal["cls", "mean"] | None = None
    attention: Attention = "auto"
    similarity: Literal["cosine", "dot"] | None = None
    prompts: dict[Side, str] = Field(default_factory=dict)

    @field_validator("preset", mode="before")
    @classmethod
    def _read_number(cls, preset: Any) -> Any:
        return str(preset) if isinstance(preset, int) else preset

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        self.settings(1)
        return self

    def settings(self, vocab_size: int) -> dict[str, Any]:
        """Return the keys of ``config.json`` of the encoder."""
        sizes = self.sizes.model_dump()
        return tite_settings(self.preset, variant=self.variant, vocab_size=vocab_size, **sizes)

    @property
    def name(self) -> str:
        """Name of the model in messages."""
        return f"a new {self.preset}"


def make_new_model(recipe: NewModel) -> Model:
    """Make a model whose weights come from torch's random generator.

    Raises:
        StorageError: The tokenizer does not exist.
        ConfigError: Sizes do not fit each other, or the tokenizer must be trained first.
    """
    if isinstance(recipe.tokenizer, DomainConfig):
        raise ConfigError(
            "model.tokenizer: one that is trained, on the texts of `pretraining`; expected irkit pretrain "
            "with such texts, or the name of a tokenizer"
        )
    tokenizer = Tokenizer.from_pretrained(local_directory(recipe.tokenizer))
    settings = recipe.settings(tokenizer.highest_id() + 1)
    settings["pad_token_id"] = tokenizer.special_ids.get("pad", 0)
    encoder = Encoder(settings, attention=recipe.attention)
    limits = [tokenizer.max_length, int(settings["max_position_embeddings"])]
    tokenizer.max_length = min(limit for limit in limits if limit is not None)
    pools = any(layer.pooling is not None for layer in encoder.config.layers)
    pooling = recipe.vector or ("mean" if pools else "cls")
    head = HEADS["dense"].create(encoder, tokenizer, {"pooling": pooling})
    return Model(tokenizer, encoder, head, prompts=recipe.prompts, similarity_name=recipe.similarity)
