"""Mean pooling over windows of ragged sequences; see README.md."""

from .op import pooled_lengths, ragged_pool
from .reference import ragged_pool_reference

__all__ = ["pooled_lengths", "ragged_pool", "ragged_pool_reference"]
