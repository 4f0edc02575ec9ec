"""Search of dense vectors by an inverted file of codes; see README.md."""

from .build import Encoder, assign, list_margins
from .checks import check_segment
from .codes import arrange, codes_at, codes_of, decode, empty_segment, put
from .cpu_search import NO_PLACE
from .op import Candidates, Effort, Searcher, effort_of
from .rotation import Rotation, make_rotation, rotate_rows, rotate_rows_back

__all__ = [
    "NO_PLACE",
    "Candidates",
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
    "rotate_rows",
    "rotate_rows_back",
]
