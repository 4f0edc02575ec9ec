"""The shared encoder core."""

from irkit.encoder.config import EncoderConfig, LayerConfig
from irkit.encoder.encoder import Encoder

__all__ = ["Encoder", "EncoderConfig", "LayerConfig"]
