"""Heads: hidden states of tokens in, one `Representation` of each text out."""

from irkit.errors import ConfigError
from irkit.heads.expected_heads import as_multi_vector_head, as_sparse_head
from irkit.heads.head import Head, Side
from irkit.heads.layer_modules import OpenedModel
from irkit.heads.multi_vector_config import MultiVectorConfig, QueryExpansion, TokenPooling
from irkit.heads.multi_vector_head import MultiVectorHead
from irkit.heads.pooled_head import PooledHead
from irkit.heads.projection import Normalize, Projection, ProjectionConfig
from irkit.heads.several_heads import SeveralHeads, check_names_of_heads
from irkit.heads.sparse_head import SparseHead
from irkit.heads.static_head import StaticHead
from irkit.heads.term_head import SparseConfig
from irkit.heads.token_weight_head import TokenWeightHead
from irkit.utils.plugins import Registry

__all__ = [
    "HEADS",
    "Head",
    "MultiVectorConfig",
    "MultiVectorHead",
    "Normalize",
    "OpenedModel",
    "PooledHead",
    "Projection",
    "ProjectionConfig",
    "QueryExpansion",
    "SeveralHeads",
    "Side",
    "SparseConfig",
    "SparseHead",
    "StaticHead",
    "TokenPooling",
    "TokenWeightHead",
    "as_multi_vector_head",
    "as_sparse_head",
    "check_names_of_heads",
    "names_of_new_heads",
    "registered_name",
]

HEADS: Registry[type[Head]] = Registry(
    "irkit.heads",
    Head,
    {
        "dense": PooledHead,
        "multi_vector": MultiVectorHead,
        "sparse": SparseHead,
        "static": StaticHead,
        "token_weight": TokenWeightHead,
    },
    reserved=(
        "pretrained",
        "new",
        "head",
        "several",
    ),  # kinds of models in recipes, where a head's name may stand, too
)
"""Heads by name; other packages add theirs as entry points ``irkit.heads``."""


def names_of_new_heads() -> list[str]:
    """Return the names in `HEADS` of heads for an encoder; ``"static"`` works without one."""
    return [name for name in HEADS if name != "static"]


def registered_name(head: Head) -> str:
    """Return the name of the class of a head in `HEADS`.

    Raises:
        ConfigError: The class is not there.
    """
    for name, kind in HEADS.items():
        if kind is type(head):
            return name
    raise ConfigError(
        f"saving a model: the head {type(head).__name__} has no name in irkit.heads.HEADS; add one by an "
        "entry point irkit.heads"
    )
