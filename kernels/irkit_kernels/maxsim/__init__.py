"""MaxSim of ragged queries and documents; see README.md."""

from .chosen import maxsim_chosen
from .op import maxsim, maxsim_int8, maxsim_stored
from .reference import quantize_rows

__all__ = ["maxsim", "maxsim_chosen", "maxsim_int8", "maxsim_stored", "quantize_rows"]
