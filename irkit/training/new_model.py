"""A model that begins with random weights: an encoder of a preset, and a vocabulary."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from irkit.config import Config
from irkit.encoder import Encoder
from irkit.encoder.presets import EncoderSizes, tite_settings
from irkit.errors import ConfigError
from irkit.heads import PooledHead
from irkit.model import Model
from irkit.model.hub import local_directory
from irkit.tokenizer import Tokenizer
from irkit.vocabulary.domain import DomainConfig

__all__ = ["NewModel", "make_new_model"]


class NewModel(Config):
    """A dense model on an encoder of random weights.

    Attributes:
        kind: How it is made.
        preset: Of `irkit.encoder.presets.tite_settings`: ``2-late`` or its number in table 3 of the paper, 1;
            ``bert-base`` is the same encoder without pooling.
        variant: ``paper``, or ``released`` as the authors' checkpoints are.
        sizes: How large it is; what is not given is as in BERT-base.
        tokenizer: Directory or name of a tokenizer or of a model; or how one is trained on the texts of
            ``pretraining``, which `irkit pretrain` does.
        vector: ``cls``, the first row of the encoder, or ``mean`` of all; None is the mean if the encoder
            pools, whose rows are one in the end, else cls.
        attention: Implementation of attention: auto, eager, sdpa or flash.
        similarity: cosine or dot.
        prompts: What is written before a text, by name: query, document.
        query_length: Tokens at which queries are cut; None is where all texts are, at ``sizes.max_length``.
        document_length: The same for documents.

    Source: TITE, sections 3.1, 3.2 and 4.1.
    """

    kind: Literal["new"]
    preset: str
    variant: Literal["paper", "released"] = "paper"
    sizes: EncoderSizes = EncoderSizes()
    tokenizer: str | DomainConfig
    vector: Literal["cls", "mean"] | None = None
    attention: Literal["auto", "eager", "sdpa", "flash"] = "auto"
    similarity: Literal["cosine", "dot"] | None = None
    prompts: dict[str, str] = Field(default_factory=dict)
    query_length: PositiveInt | None = None
    document_length: PositiveInt | None = None

    @field_validator("preset", mode="before")
    @classmethod
    def _numbered(cls, given: Any) -> Any:
        return str(given) if isinstance(given, int) else given

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.settings(1)
        return self

    def settings(self, vocab_size: int) -> dict[str, Any]:
        """The keys of ``config.json`` of its encoder."""
        sizes = self.sizes.model_dump()
        return tite_settings(self.preset, variant=self.variant, vocab_size=vocab_size, **sizes)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"a new {self.preset}"


def make_new_model(recipe: NewModel) -> Model:
    """Make it; its weights come from torch's generator.

    Raises:
        StorageError: There is no such tokenizer.
        ConfigError: Sizes do not fit each other, or the tokenizer is one that is still to be trained.
    """
    if isinstance(recipe.tokenizer, DomainConfig):
        raise ConfigError(
            "model.tokenizer: one that is trained, on the texts of `pretraining`; expected irkit pretrain "
            "with such texts, or the name of a tokenizer"
        )
    tokenizer = Tokenizer.from_pretrained(local_directory(recipe.tokenizer))
    settings = recipe.settings(tokenizer.vocab_size)
    settings["pad_token_id"] = tokenizer.special_ids.get("pad", 0)
    encoder = Encoder(settings, attention=recipe.attention)
    limits = [tokenizer.max_length, int(settings["max_position_embeddings"])]
    tokenizer.max_length = min(limit for limit in limits if limit is not None)
    pools = any(layer.pooling is not None for layer in encoder.config.layers)
    head = PooledHead(encoder.hidden_size, recipe.vector or ("mean" if pools else "cls"))
    return Model(tokenizer, encoder, head, prompts=recipe.prompts, similarity_name=recipe.similarity)
