"""The encoders of the suite ``tite``: ours, transformers', and the authors' of TITE, with random weights."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from irkit import Encoder, Ragged
from irkit.encoder.checkpoint_weights import export_weights
from irkit.encoder.presets import PRESETS, tite_settings

__all__ = ["AS_THEY_COME", "BACKENDS", "COMPARED", "TITE", "Backends", "Contender", "Sizes", "contenders"]

AS_THEY_COME = "authors, texts as they come"  # their script does not sort
TITE = {  # presets by name, that of the same size without pooling first
    "no pooling": "bert-base",
    **{f"TITE {number}: {name}": name for number, name in enumerate(PRESETS, 1) if name != "bert-base"},
}
COMPARED = tuple(TITE)[:3]  # those that the authors' code runs, too

Sizes = Mapping[str, int]
"""What differs from BERT-base: some of ``layers``, ``hidden_size``, ``heads`` and ``intermediate_size``."""

Backends = Mapping[str, tuple[str, ...]]
BACKENDS: dict[str, Backends] = {  # by whose code, the fastest first; with others, few presets are timed
    "cpu": {"irkit": ("sdpa", "eager"), "authors": ("sdpa", "eager"), "transformers": ("sdpa", "eager")},
    "cuda": {
        "irkit": ("flash", "sdpa", "eager"),
        "authors": ("flash", "sdpa", "eager"),
        "transformers": ("sdpa", "eager"),
    },
}


@dataclass(frozen=True)
class Contender:
    """An encoder with the code and the kind of attention that runs it.

    Attributes:
        model: Name of the model; contenders of one name have the same weights.
        code: Whose code runs it.
        attention: Which implementation of attention it uses.
        prepare: Function that makes the input of ``encode`` from token ids.
        encode: Function that returns the rows of all texts, ``(total, width)``.
        batches: Name of the batches that it gets, see `benchmarks.tite.batches`.
        timed: Whether it is timed; if not, it only checks the outputs of others.
    """

    model: str
    code: str
    attention: str
    prepare: Callable[[Ragged], Any]
    encode: Callable[[Any], Tensor]
    batches: str = "small"
    timed: bool = True

    @property
    def name(self) -> str:
        """Name among the contenders of one precision."""
        return f"{self.code} {self.model} {self.attention}"


def contenders(device: str, dtype: torch.dtype, sizes: Sizes) -> Iterator[Contender]:
    """Yield all contenders; report those that cannot run. irkit is never the first of a model."""
    backends = BACKENDS[device]
    yield from _transformers(backends, device, dtype, sizes)
    for name, encoder in _encoders(device, dtype, sizes).items():
        compared = [*_authors(name, encoder, backends["authors"])] if name in COMPARED else []
        ours = [_ours(name, encoder, backend) for backend in backends["irkit"]]
        for one in (*compared, *ours):
            fastest = one.attention == backends[one.code][0]
            timed = fastest or name == COMPARED[1] or (name == COMPARED[0] and one.code == "irkit")
            yield replace(one, batches="small" if name == COMPARED[0] else "large", timed=timed)
            if one.code == "authors" and fastest and name != COMPARED[0]:
                yield replace(one, code=AS_THEY_COME, batches="mixed")


def _transformers(backends: Backends, device: str, dtype: torch.dtype, sizes: Sizes) -> Iterator[Contender]:
    """Yield BERT, which irkit runs, too, and others of its size; Funnel has only eager attention."""
    from transformers import AutoModel

    single = {"Funnel": ("eager",), "ModernBERT": backends["transformers"][:1]}
    for name, config in _configs(**sizes).items():
        first = None
        for backend in single.get(name, backends["transformers"]):
            with torch.device(device):  # which is also where the weights are drawn
                model = AutoModel.from_config(config, attn_implementation=backend).to(dtype).eval()
            if first is not None:
                model.load_state_dict(first.state_dict(), assign=True)
            first = first or model
            yield _padded(name, "transformers", backend, model)
        if name == "BERT" and first is not None:
            with tempfile.TemporaryDirectory() as folder:
                first.save_pretrained(folder)
                encoder = Encoder.from_pretrained(folder, dtype=dtype).to(device)
            yield from (_ours(name, encoder, backend) for backend in backends["irkit"])


def _configs(
    layers: int = 12,
    hidden_size: int = 768,
    heads: int = 12,
    intermediate_size: int = 3072,
    vocab_size: int = 30_522,
    **_: int,
) -> dict[str, Any]:
    """Return BERT-base and models as wide; ModernBERT has the layers and inner width of ModernBERT-base."""
    from transformers import BertConfig, DistilBertConfig, FunnelConfig, ModernBertConfig

    words: dict[str, Any] = {"vocab_size": vocab_size, "pad_token_id": 0}
    wide = words | {"hidden_size": hidden_size, "num_attention_heads": heads}
    return {
        "BERT": BertConfig(**wide, num_hidden_layers=layers, intermediate_size=intermediate_size),
        "DistilBERT": DistilBertConfig(
            **words, dim=hidden_size, n_layers=layers // 2, n_heads=heads, hidden_dim=intermediate_size
        ),
        "ModernBERT": ModernBertConfig(
            **wide, num_hidden_layers=layers * 22 // 12, intermediate_size=intermediate_size * 3 // 8
        ),
        "Funnel": FunnelConfig(  # funnel-transformer/medium-base
            **words,
            architectures=["FunnelBaseModel"],
            block_sizes=[layers // 2, layers // 4, layers // 4],
            block_repeats=[1, 2, 2],
            d_model=hidden_size,
            n_head=heads,
            d_head=hidden_size // heads,
            d_inner=intermediate_size,
        ),
    }


def _encoders(device: str, dtype: torch.dtype, sizes: Sizes) -> dict[str, Encoder]:
    """Return irkit's encoders by name. Encoders of one shape share weights, because pooling has none."""
    encoders: dict[str, Encoder] = {}
    for name, preset in TITE.items():
        settings = tite_settings(preset, **sizes)
        with torch.device("meta"):
            encoder = Encoder(settings)
        same = [other for other in encoders.values() if _shapes(other) == _shapes(encoder)]
        with torch.device(device):
            first = same[0] if same else Encoder(settings).to(dtype)
        encoder.load_state_dict(first.state_dict(), assign=True)
        encoders[name] = encoder.eval()
    return encoders


def _shapes(encoder: Encoder) -> list[torch.Size]:
    return [parameter.shape for parameter in encoder.parameters()]


def _authors(name: str, encoder: Encoder, backends: tuple[str, ...]) -> Iterator[Contender]:
    """Yield the authors' code with the weights of ``encoder``; on CUDA it pools by its own kernel."""
    peers = os.environ.get("IRKIT_PEERS", "")
    if peers and peers not in sys.path:
        sys.path.append(peers)
    device = encoder.word_embeddings.device
    weights = export_weights(dict(encoder.named_parameters()), encoder.names())
    for backend in backends:
        try:
            from tite.model.tite import TiteConfig, TiteModel

            config = TiteConfig(
                **encoder.settings,
                attn_implementation="flash_attention_2" if backend == "flash" else backend,
                pooling_implementation="triton" if device.type == "cuda" else "eager",
            )
            with device:
                model = TiteModel(config)
        except (ImportError, ValueError) as error:  # it is not there, or flash-attn is not
            print(f"tite: authors' {name} {backend} is left out: {error}", file=sys.stderr)
            continue
        model.load_state_dict(weights, assign=True)
        yield _padded(name, "authors", backend, model.eval())


def _ours(name: str, encoder: Any, backend: str) -> Contender:
    def encode(tokens: Ragged) -> Tensor:
        encoder.attention = backend
        rows: Ragged = encoder(tokens)
        return rows.values

    return Contender(name, "irkit", backend, lambda tokens: tokens, encode)


def _padded(name: str, code: str, backend: str, model: Any) -> Contender:
    """Return a contender that takes padded rows. Its outputs are as long, without padding, or pooled."""

    def encode(batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, mask = batch
        rows = model(input_ids=ids, attention_mask=mask).last_hidden_state
        kept: Tensor = rows[mask.bool()] if rows.shape[:2] == mask.shape else rows.flatten(0, 1)
        return kept

    def prepare(tokens: Ragged) -> tuple[Tensor, Tensor]:
        ids, mask = tokens.to_padded()
        return ids, mask.long()

    return Contender(name, code, backend, prepare, encode)
