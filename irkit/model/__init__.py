"""A retrieval model as one object, and what running it takes: batches, devices, precision, the hub."""

from irkit.model.model import EncodeOptions, Model
from irkit.model.pipeline import Device, Pipeline, Side

__all__ = ["Device", "EncodeOptions", "Model", "Pipeline", "Side"]
