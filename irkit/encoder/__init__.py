"""The shared encoder core."""

from irkit.encoder.config import EncoderConfig, LayerConfig, Pooling
from irkit.encoder.encoder import Encoder

__all__ = ["Encoder", "EncoderConfig", "LayerConfig", "Pooling"]
