"""A small BERT of random weights, for tests and for programs that tests start."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ["a", "an", "the", "of", "in", "on", "search", "index", "vector", "token", "model", "neural", "text"]


def write_tiny_bert(path: Path) -> None:
    """Write a BERT, 2 layers x 32, and a WordPiece tokenizer of a few words and all letters."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    settings = {
        "tokenizer_class": "BertTokenizerFast",
        "model_max_length": 64,
        "do_lower_case": True,
        **names,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    BertModel(config).save_pretrained(path)
