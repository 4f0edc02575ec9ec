"""Which model is trained: as it is, with a new head on the encoder of another, or all new."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from irkit.config import Config
from irkit.errors import ConfigError, StorageError
from irkit.formats import SIMILARITIES
from irkit.heads import MultiVectorConfig, Side, SparseConfig
from irkit.heads.projection import projection_config
from irkit.model import Model
from irkit.model.pooling import pooling_choice
from irkit.model.queries import query_config
from irkit.training.new_model import NewModel, make_new_model

__all__ = ["ModelRecipe", "MultiVectorModel", "PretrainedModel", "SparseModel", "make_model"]


def _known_projection(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is not None:
        projection_config(choice)
    return choice


def _known_queries(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is not None:
        query_config(choice)
    return choice


def _known_pooling(choice: Any) -> Any:
    if choice is not None:
        pooling_choice(choice)
    return choice


Pooling = Annotated[dict[str, Any] | list[dict[str, Any] | None] | None, AfterValidator(_known_pooling)]
Queries = Annotated[str | dict[str, Any] | None, AfterValidator(_known_queries)]


class _ModelRecipe(Config):
    """What every model has.

    Attributes:
        kind: How it is made.
        name: Directory, or name on the Hugging Face hub.
        attention: Implementation of attention: auto, eager, sdpa or flash.
        similarity: cosine, dot, maxsim or meanmaxsim; None is that of the kind or of the model.
        prompts: What is written before a text, by name: query, document.
    """

    kind: str
    name: str
    attention: Literal["auto", "eager", "sdpa", "flash"] = "auto"
    similarity: Literal["cosine", "dot", "maxsim", "meanmaxsim"] | None = None
    prompts: dict[str, str] = Field(default_factory=dict)


class PretrainedModel(_ModelRecipe):
    """A model goes on where its training ended; a bare encoder makes dense vectors by mean pooling.

    Attributes:
        max_length: Tokens at which texts are cut; None is what the model says.
        query_length: The same for queries only.
        document_length: The same for documents only.
        queries: A side of their own for the queries of a sparse model, see `Model.set_queries`.
        pooling: Which layers of the encoder pool, see `Model.pool`; None is as it was.
    """

    kind: Literal["pretrained"] = "pretrained"
    max_length: PositiveInt | None = None
    query_length: PositiveInt | None = None
    document_length: PositiveInt | None = None
    queries: Queries = None
    pooling: Pooling = None


class MultiVectorModel(_ModelRecipe):
    """A new multi-vector model on the encoder of another, see `Model.multi_vector`.

    Attributes:
        pooling: Which layers of the encoder pool, see `Model.pool`; None is as it was.
    """

    kind: Literal["multi_vector"] = "multi_vector"
    projection: Annotated[str | dict[str, Any] | None, AfterValidator(_known_projection)] = "linear"
    config: MultiVectorConfig = MultiVectorConfig()
    markers: tuple[str, str] | None = None
    pooling: Pooling = None


class SparseModel(_ModelRecipe):
    """A new learned sparse model on the encoder of another, see `Model.sparse`.

    Attributes:
        vocabulary: Terms, or a file of one a line; None is the tokens of the tokenizer.
        max_length: Tokens at which texts are cut; None is what the tokenizer says.
        query_length: The same for queries only.
        document_length: The same for documents only.
    """

    kind: Literal["sparse"] = "sparse"
    config: SparseConfig = SparseConfig()
    vocabulary: list[str] | str | None = None
    max_length: PositiveInt | None = None
    query_length: PositiveInt | None = None
    document_length: PositiveInt | None = None
    queries: Queries = None


def _with_kind(given: Any) -> Any:
    if isinstance(given, str | Path):
        given = {"name": str(given)}
    return {"kind": "pretrained", **given} if isinstance(given, Mapping) else given


ModelRecipe = Annotated[
    Annotated[PretrainedModel | MultiVectorModel | SparseModel | NewModel, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]


def make_model(recipe: ModelRecipe) -> Model:
    """Load it, or make it of random weights, which come from torch's generator.

    Raises:
        StorageError: There is no such model or file.
        ConfigError: It is of a kind that irkit cannot run, or settings do not fit it.
    """
    if isinstance(recipe, NewModel):
        model = make_new_model(recipe)
        _set_lengths(model, recipe)
        return model
    model = _load(recipe)
    model.prompts |= recipe.prompts
    if recipe.similarity is not None:
        if recipe.similarity not in SIMILARITIES[model.kind]:
            raise ConfigError(
                f"model.similarity: {recipe.similarity!r} does not compare {model.kind} representations; "
                f"expected {' or '.join(SIMILARITIES[model.kind])}"
            )
        model.similarity_name = recipe.similarity
    if not isinstance(recipe, MultiVectorModel):  # whose configuration has them
        _set_lengths(model, recipe)
    if not isinstance(recipe, SparseModel) and recipe.pooling is not None:
        model.pool(recipe.pooling)
    return model


def _set_lengths(model: Model, recipe: PretrainedModel | SparseModel | NewModel) -> None:
    if not isinstance(recipe, NewModel) and recipe.max_length is not None:
        for part in (model, model.query_model):
            if part is not None:
                limits = [recipe.max_length, part.tokenizer.max_length]
                part.tokenizer.max_length = min(limit for limit in limits if limit is not None)
    lengths: dict[Side, int | None] = {"query": recipe.query_length, "document": recipe.document_length}
    for side, length in lengths.items():
        if length is not None:
            model.set_length(side, length)


def _load(recipe: PretrainedModel | MultiVectorModel | SparseModel) -> Model:
    if isinstance(recipe, MultiVectorModel):
        return Model.multi_vector(
            recipe.name,
            recipe.projection,
            recipe.config,
            markers=recipe.markers,
            device="cpu",  # the trainer moves it
            attention=recipe.attention,
        )
    if isinstance(recipe, SparseModel):
        return Model.sparse(
            recipe.name,
            recipe.config,
            vocabulary=_terms(recipe.vocabulary),
            queries=recipe.queries,
            device="cpu",
            attention=recipe.attention,
        )
    model = Model.from_pretrained(recipe.name, device="cpu", attention=recipe.attention)
    return model if recipe.queries is None else model.set_queries(recipe.queries)


def _terms(vocabulary: list[str] | str | None) -> list[str] | None:
    if not isinstance(vocabulary, str):
        return vocabulary
    try:
        return Path(vocabulary).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"model.vocabulary: reading {vocabulary}: {error}") from error
