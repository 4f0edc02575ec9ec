"""Search of dense vectors by an inverted file of codes; see README.md."""

from .build import Encoder, arrange, assign, codes_of, list_margins, pack_signs, unpack_signs
from .checks import check_segment
from .op import Effort, Searcher, effort_of
from .rotation import Rotation, make_rotation

__all__ = [
    "Effort",
    "Encoder",
    "Rotation",
    "Searcher",
    "arrange",
    "assign",
    "check_segment",
    "codes_of",
    "effort_of",
    "list_margins",
    "make_rotation",
    "pack_signs",
    "unpack_signs",
]
