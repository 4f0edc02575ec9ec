"""Tokenizer, encoder and head as one module: texts in, representations out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional as F

from irkit.errors import BadValueError
from irkit.formats import AnyEncoder
from irkit.heads import PooledHead
from irkit.model.batching import Progress, ahead, chunks, encode_tokens
from irkit.model.hardware import Device, find_device, find_devices
from irkit.model.parallel import encode_in_processes
from irkit.model.similarity import SIMILARITIES
from irkit.ragged import Ragged
from irkit.representation import Dense, Representation, concat
from irkit.tokenizer import Tokenizer, strings

__all__ = ["Pipeline", "Side", "finished"]

Side = Literal["query", "document"]

_CHUNK = 2048  # texts that are sorted by length together
_BUDGET = {"cpu": 1024, "cuda": 32768}  # tokens a step: what stays in the cache, what fills the device


class Pipeline(nn.Module):
    """What `irkit.Model` runs; its attributes are described there."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: AnyEncoder,
        head: PooledHead,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_name: str = "cosine",
        truncate_dim: int | None = None,
    ) -> None:
        """Join the parts. The tokenizer is set to cut texts at the positions the encoder has.

        Raises:
            BadValueError: There is no such similarity or prompt.
        """
        super().__init__()
        self.tokenizer, self.encoder, self.head = tokenizer, encoder, head
        self.prompts = {"query": "", "document": "", **(prompts or {})}
        self.default_prompt_name = default_prompt_name
        self.similarity_name = similarity_name
        self.truncate_dim = truncate_dim
        self.tokens_per_step: int | None = None
        self.devices: list[torch.device] = []
        self.prompt_named(default_prompt_name)
        if similarity_name not in SIMILARITIES:
            raise BadValueError(
                f"Model: similarity {similarity_name!r}, expected one of {', '.join(SIMILARITIES)}"
            )
        limits = [limit for limit in (tokenizer.max_length, encoder.max_positions) if limit is not None]
        tokenizer.max_length = min(limits, default=None)

    @property
    def kind(self) -> str:
        """Kind of its representations: ``"dense"``."""
        return self.head.kind

    @property
    def dim(self) -> int:
        """Width of its vectors."""
        return min(self.truncate_dim or self.head.dim, self.head.dim)

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        return next(self.encoder.parameters()).device

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that stand for weights, head and tokenizer, in whatever precision they run.

        Computed from the weights at each call, 0.1 s for 20 million.
        """
        digest = hashlib.blake2b(f"{self.head!r} {self.tokenizer.signature}".encode(), digest_size=16)
        for name, weight in sorted(self.named_parameters()):
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            rounded = weight.detach().to("cpu", torch.bfloat16).contiguous()
            digest.update(rounded.view(torch.int16).numpy().data)
        return digest.hexdigest()

    def prompt_named(self, name: str | None) -> str:
        """What is written before a text; nothing for None.

        Raises:
            BadValueError: There is no prompt of that name.
        """
        if name is not None and name not in self.prompts:
            raise BadValueError(f"Model: no prompt is named {name!r}, there are {', '.join(self.prompts)}")
        return self.prompts[name] if name is not None else ""

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, tokens: Ragged, prompt_length: int = 0) -> Representation: ...  # noqa: D102

    def forward(self, tokens: Ragged, prompt_length: int = 0) -> Representation:
        """Encode token ids, with gradients: what training runs.

        Args:
            tokens: Ragged int64 on the device of the model.
            prompt_length: Leading tokens of each row that are the prompt.
        """
        return self.head(self.encoder(tokens), tokens, prompt_length)

    def encode_tokens(
        self,
        tokens: Ragged,
        *,
        prompt_length: int = 0,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> Representation:
        """What the head makes of token ids, without gradients: float32 on the CPU, in order.

        Args:
            tokens: Ragged int64 on the CPU.
            prompt_length: Leading tokens of each row that are the prompt.
            batch_size: Most rows encoded at once, beside `tokens_per_step`.
            progress: Called with the number of rows finished since its last call.
        """
        self.eval()
        budget = self.tokens_per_step or _BUDGET.get(self.device.type, _BUDGET["cpu"])
        return encode_tokens(
            self.encoder,
            self.head,
            tokens,
            budget=budget,
            batch_size=batch_size,
            prompt_length=prompt_length,
            progress=progress,
        )

    def encode_stream(
        self,
        texts: Iterable[str],
        prompt: str = "",
        *,
        chunk_size: int = _CHUNK,
        batch_size: int | None = None,
        progress: Progress | None = None,
        device: Device | None = None,
    ) -> Iterator[Representation]:
        """What the head makes of texts, in chunks; the next one is tokenized while one is encoded.

        Args:
            texts: Read as they are needed.
            prompt: Written before each text.
            chunk_size: Texts read, tokenized and sorted by length together.
            batch_size: Most texts encoded at once, beside `tokens_per_step`.
            progress: Called with the number of texts finished since its last call.
            device: Move the model there first; or several, each of which gets a process of its own.

        Yields:
            The rows of each ``chunk_size`` texts; one part without rows if there are no texts.
        """
        pieces = chunks(strings(texts), chunk_size)
        length = self.tokenizer.prompt_length(prompt)
        empty = True
        if device is None or isinstance(device, str | torch.device):
            if device is not None:
                self.to(find_device(device))
            for tokens in ahead(partial(self.tokenizer, prompt=prompt), pieces):
                empty = False
                yield self.encode_tokens(
                    tokens, prompt_length=length, batch_size=batch_size, progress=progress
                )
        else:
            for part in encode_in_processes(self, find_devices(device), pieces, prompt, batch_size):
                empty = False
                yield part
                if progress is not None:
                    progress(len(part))
        if empty:
            yield self.encode_tokens(self.tokenizer([]))

    def represent(self, texts: Iterable[str], side: Side, progress: Progress | None = None) -> Representation:
        """Encode texts for an index or a search.

        Args:
            texts: Texts.
            side: ``"query"`` or ``"document"``; decides the prompt.
            progress: Called with the number of texts finished since its last call.

        Returns:
            A row a text in order, float32 on the CPU, such that `irkit.score` is the similarity of the
            model: for cosine, vectors have length 1.

        Raises:
            BadTypeError: Something is not a string.
            BadValueError: The similarity of the model is not an inner product.
        """
        return concat(self.represent_stream(texts, side, progress=progress))

    def represent_stream(
        self,
        texts: Iterable[str],
        side: Side,
        *,
        chunk_size: int = _CHUNK,
        progress: Progress | None = None,
        device: Device | None = None,
    ) -> Iterator[Representation]:
        """As `represent`, for any number of texts; arguments and parts as in `encode_stream`.

        A model that was loaded for several devices runs a process on each of them here, unless one chunk
        holds all texts.
        """
        if self.similarity_name not in ("cosine", "dot"):
            raise BadValueError(
                f"represent: the similarity of the model is {self.similarity_name}, no inner product; "
                "use encode and similarity"
            )
        unit, prompt = self.similarity_name == "cosine", self.prompt_named(side)
        if device is None and len(self.devices) > 1:
            texts = iter(texts)
            first = list(islice(texts, max(0, chunk_size) + 1))
            texts, device = chain(first, texts), self.devices if len(first) > chunk_size else None
        stream = self.encode_stream(texts, prompt, chunk_size=chunk_size, progress=progress, device=device)
        for part in stream:
            yield finished(part, self.truncate_dim, unit)


def finished(representation: Representation, dim: int | None, unit: bool) -> Representation:
    """Cut Dense vectors to ``dim`` and scale them to length 1; other kinds come finished from their head."""
    if dim is not None and dim < 1:
        raise BadValueError(f"truncate_dim must be at least 1, got {dim}")
    if not isinstance(representation, Dense):
        return representation
    values = representation.values[:, :dim].contiguous()
    return Dense(F.normalize(values, dim=1) if unit else values)
