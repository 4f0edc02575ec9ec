"""Search of dense vectors by an inverted file of codes; see README.md."""

from .build import Encoder, assign, list_margins
from .checks import check_segment
from .codes import arrange, codes_at, codes_of, decode, empty_segment, put
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
    "codes_at",
    "codes_of",
    "decode",
    "effort_of",
    "empty_segment",
    "list_margins",
    "make_rotation",
    "put",
]
