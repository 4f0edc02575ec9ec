"""Which model is trained: an existing one, a new head on the encoder of another, or a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from irkit.arguments import suggest
from irkit.config import Config
from irkit.errors import ConfigError, StorageError
from irkit.formats import SIMILARITIES
from irkit.heads import MultiVectorConfig, Side, SparseConfig, names_of_new_heads
from irkit.heads.projection import projection_config
from irkit.model import Model
from irkit.model.pooling import pooling_choice
from irkit.model.queries import query_config
from irkit.training.new_model import Attention, Lengths, NewModel, make_new_model


def _valid(check: Callable[[Any], object]) -> AfterValidator:
    """Make a validator that calls ``check`` on a setting, unless the setting is None.

    Args:
        check: The function that reads the setting later; raises an error for a bad one.
    """

    def validate(setting: Any) -> Any:
        if setting is not None:
            check(setting)
        return setting

    return AfterValidator(validate)


Pooling = Annotated[dict[str, Any] | list[dict[str, Any] | None] | None, _valid(pooling_choice)]
Queries = Annotated[str | dict[str, Any] | None, _valid(query_config)]
Projection = Annotated[str | dict[str, Any] | None, _valid(projection_config)]


class _NamedModel(Config):
    """The settings that every model with a name has.

    Attributes:
        kind: How the model is made.
        name: Directory, or name on the Hugging Face hub.
        attention: Implementation of attention: auto, eager, sdpa or flash.
        similarity: cosine, dot, maxsim or meanmaxsim; None keeps the similarity of an existing model, and
            chooses the default of a new one.
        prompts: Text that is put in front of every text of a side; the keys are ``query`` and ``document``.
    """

    kind: str
    name: str
    attention: Attention = "auto"
    similarity: Literal["cosine", "dot", "maxsim", "meanmaxsim"] | None = None
    prompts: dict[Side, str] = Field(default_factory=dict)


class _CutModel(Lengths, _NamedModel):
    max_length: PositiveInt | None = None


class PretrainedModel(_CutModel):
    """An existing model. A bare encoder makes dense vectors by mean pooling.

    Attributes:
        max_length: Texts are cut to this number of tokens; None cuts them where the model does.
        query_length: ``max_length`` for queries only.
        document_length: ``max_length`` for documents only.
        queries: How a sparse model represents queries, if not like documents; see `Model.set_queries`.
        pooling: Which layers of the encoder pool, see `Model.add_pooling_layers`; None leaves them as they
            are.
    """

    kind: Literal["pretrained"] = "pretrained"
    queries: Queries = None
    pooling: Pooling = None


class MultiVectorModel(_NamedModel):
    """A new multi-vector model on the encoder of another, see `Model.multi_vector`.

    Attributes:
        pooling: Which layers of the encoder pool, see `Model.add_pooling_layers`; None leaves them as they
            are.
    """

    kind: Literal["multi_vector"] = "multi_vector"
    projection: Projection = "linear"
    config: MultiVectorConfig = MultiVectorConfig()
    markers: tuple[str, str] | None = None
    normalize: bool = True
    pooling: Pooling = None


class SparseModel(_CutModel):
    """A new learned sparse model on the encoder of another, see `Model.sparse`.

    Attributes:
        vocabulary: Terms, or a file with one per line; None takes the tokens of the tokenizer.
        max_length: Texts are cut to this number of tokens; None cuts them where the tokenizer does.
        query_length: ``max_length`` for queries only.
        document_length: ``max_length`` for documents only.
        queries: How the model represents queries, if not like documents; see `Model.set_queries`.
        lowercase: Read all texts in lower case, whatever the tokenizer does.
    """

    kind: Literal["sparse"] = "sparse"
    config: SparseConfig = SparseConfig()
    vocabulary: list[str] | str | None = None
    queries: Queries = None
    lowercase: bool = False


class HeadModel(_CutModel):
    """A new model with any head of `irkit.heads.HEADS` on the encoder of another, see `Model.with_head`.

    The name of the head may stand as ``kind``: ``kind: my_head`` is ``kind: head, head: my_head``.

    Attributes:
        head: Name of the head.
        config: Settings of the head.
        max_length: Texts are cut to this number of tokens; None cuts them where the tokenizer does.
        query_length: ``max_length`` for queries only.
        document_length: ``max_length`` for documents only.
        pooling: Layers of the encoder that pool, see `Model.add_pooling_layers`; None adds none.
    """

    kind: Literal["head"] = "head"
    head: str
    config: dict[str, Any] = Field(default_factory=dict)
    pooling: Pooling = None


class SeveralModel(_CutModel):
    """A new model with several heads on the encoder of another, see `Model.several`.

    Attributes:
        heads: Settings of each head by name; a string is the name of a head in `irkit.heads.HEADS`.
        max_length: Texts are cut to this number of tokens; None cuts them where the tokenizer does.
        query_length: ``max_length`` for queries only.
        document_length: ``max_length`` for documents only.
    """

    kind: Literal["several"] = "several"
    heads: dict[str, str | dict[str, Any]] = Field(min_length=2)


def _with_kind(data: Any) -> Any:
    """Complete the ``model`` of a recipe: return its keys and values with a valid ``kind``.

    A string becomes a pre-trained model of this name. ``kind`` is ``"pretrained"`` by default. A kind that is
    the name of a head becomes ``kind: head`` with this ``head``. Values that are neither text nor mapping are
    returned as they are.
    """
    if isinstance(data, str | Path):
        data = {"name": str(data)}
    if not isinstance(data, Mapping):
        return data
    kind = data.get("kind", "pretrained")
    if isinstance(kind, str) and kind not in MODEL_KINDS:
        if kind not in names_of_new_heads():
            raise ValueError(f"unknown kind {kind!r}; {suggest(kind, list_kinds())}")
        return {**data, "kind": "head", "head": kind}
    return {**data, "kind": kind}


def list_kinds() -> list[str]:
    """Return the values that a recipe may give to ``model.kind``: kinds of models, and names of heads."""
    return list(dict.fromkeys([*MODEL_KINDS, *names_of_new_heads()]))


MODEL_KINDS = ("pretrained", "multi_vector", "sparse", "new", "head", "several")


ModelRecipe = Annotated[
    Annotated[
        PretrainedModel | MultiVectorModel | SparseModel | HeadModel | SeveralModel | NewModel,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_with_kind),
]


def make_model(recipe: ModelRecipe) -> Model:
    """Load a model, or make one whose new weights come from torch's random generator.

    Raises:
        StorageError: The model or a file does not exist.
        ConfigError: irkit cannot run this kind of model, or settings do not fit it.
    """
    if isinstance(recipe, NewModel):
        model = make_new_model(recipe)
    else:
        model = _load(recipe)
        model.prompts |= {str(side): prompt for side, prompt in recipe.prompts.items()}
        if recipe.similarity is not None:
            if recipe.similarity not in SIMILARITIES[model.kind]:
                raise ConfigError(
                    f"model.similarity: {recipe.similarity!r} does not compare {model.kind} representations; "
                    f"expected {' or '.join(SIMILARITIES[model.kind])}"
                )
            model.similarity_name = recipe.similarity
    if isinstance(recipe, Lengths):  # the configuration of a multi-vector model has them
        _set_lengths(model, recipe)
    if isinstance(recipe, PretrainedModel | MultiVectorModel | HeadModel) and recipe.pooling is not None:
        model.add_pooling_layers(recipe.pooling)
    return model


def trained_model(recipe: ModelRecipe, folder: Path) -> PretrainedModel:
    """Return a recipe that opens the model in ``folder``, which an earlier stage made from ``recipe``.

    The model has its prompts and lengths, which the earlier stage may have changed. Other settings that both
    kinds of recipes have are copied.
    """
    settings = PretrainedModel.model_fields.keys() & type(recipe).model_fields.keys()
    settings -= {"kind", "name", "pooling", "prompts", "query_length", "document_length"}
    return PretrainedModel(name=str(folder), **{name: getattr(recipe, name) for name in settings})


def _set_lengths(model: Model, recipe: Lengths) -> None:
    lengths: dict[Side, int | None] = {"query": recipe.query_length, "document": recipe.document_length}
    if isinstance(recipe, _CutModel) and recipe.max_length is not None:
        for side in (model, model.query_model):
            if side is not None:
                limits = [recipe.max_length, side.tokenizer.max_length]
                side.tokenizer.max_length = min(limit for limit in limits if limit is not None)
        for name in lengths:
            if (model.max_length(name) or 0) > recipe.max_length:  # a length of its head
                model.set_length(name, recipe.max_length)
    for name, length in lengths.items():
        if length is not None:
            model.set_length(name, length)


def _load(recipe: PretrainedModel | MultiVectorModel | SparseModel | HeadModel | SeveralModel) -> Model:
    options: dict[str, Any] = {"device": "cpu", "attention": recipe.attention}  # the trainer moves it
    if isinstance(recipe, MultiVectorModel):
        options |= {"markers": recipe.markers, "normalize": recipe.normalize}
        return Model.multi_vector(recipe.name, recipe.projection, recipe.config, **options)
    if isinstance(recipe, SparseModel):
        terms = _read_terms(recipe.vocabulary)
        made = Model.sparse(recipe.name, recipe.config, vocabulary=terms, queries=recipe.queries, **options)
        if recipe.lowercase:
            for side in filter(None, (made, made.query_model)):
                side.tokenizer.lowercase()
        return made
    if isinstance(recipe, SeveralModel):
        return Model.several(recipe.name, recipe.heads, **options)
    if isinstance(recipe, HeadModel):
        return Model.with_head(recipe.head, recipe.name, recipe.config, **options)
    model = Model.from_pretrained(recipe.name, **options)
    return model if recipe.queries is None else model.set_queries(recipe.queries)


def _read_terms(vocabulary: list[str] | str | None) -> list[str] | None:
    if not isinstance(vocabulary, str):
        return vocabulary
    try:
        return Path(vocabulary).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"model.vocabulary: reading {vocabulary}: {error}") from error
