"""A retrieval model as one object, and the code to run it: batches, devices, precision, the hub."""

from irkit.model.encode_options import EncodeOptions
from irkit.model.hardware import Device
from irkit.model.model import Model
from irkit.model.pipeline import Pipeline
from irkit.model.queries import idf_weights

__all__ = ["Device", "EncodeOptions", "Model", "Pipeline", "idf_weights"]
