"""The encoder: token ids to hidden states, on rows of different lengths without padding."""

from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.encoder import Encoder
from irkit.encoder.encoder_config import EncoderConfig, LayerConfig, Pooling
from irkit.encoder.static_encoder import StaticEncoder

__all__ = ["AnyEncoder", "Encoder", "EncoderConfig", "LayerConfig", "Pooling", "StaticEncoder"]

AnyEncoder = Encoder | TransformersEncoder | StaticEncoder
