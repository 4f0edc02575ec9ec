"""Tokenizers, which turn texts into token ids, from the files of a model directory."""

from irkit.tokenizer.text_tokenizer import Tokenizer, TokenSpan, strings, well_formed
from irkit.tokenizer.tokenizer_files import read_optional, sentence_settings

__all__ = ["TokenSpan", "Tokenizer", "read_optional", "sentence_settings", "strings", "well_formed"]
