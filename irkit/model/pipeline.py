"""Tokenizer, encoder and head as one module: texts in, representations out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn
from torch.nn import functional as F

from irkit.arguments import check_functions, is_count, shown
from irkit.encoder import Encoder
from irkit.encoder.lookup import NoEncoder
from irkit.errors import BadValueError
from irkit.forking import one_thread_after_fork
from irkit.formats import SIMILARITIES, AnyEncoder, SideParts
from irkit.heads import Head, MultiVectorConfig, MultiVectorHead, Side, SparseHead
from irkit.heads.static import StaticHead
from irkit.model.batching import Progress, Template, ahead, begin_tokens, behind, chunks, hidden_states
from irkit.model.hardware import Device, find_device, find_devices, keep_few_shapes
from irkit.model.parallel import encode_in_processes
from irkit.model.pooling import check_pooling
from irkit.model.similarity import averaged, unit_length
from irkit.ragged import Ragged
from irkit.representation import Dense, MultiVector, Representation, Sparse, concat
from irkit.tokenizer import Piece, Tokenizer, strings

__all__ = ["Pipeline", "Side"]

_CHUNK = 2048  # texts that are sorted by length together
_BUDGET = {"cpu": 1024, "cuda": 32768}  # tokens a step: what stays in the cache, what fills the device
_MORE = 4  # times as many at most where layers pool, so that enough rows are left for the last of them


class Pipeline(nn.Module):
    """What `irkit.Model` runs; its attributes are described there."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: AnyEncoder | NoEncoder,
        head: Head,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_name: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        """Join the parts. The tokenizer is set to cut texts at the positions the encoder has.

        Raises:
            BadValueError: There is no such similarity or prompt, queries are expanded beyond the positions of
                the encoder, a length leaves nothing of a text or a vector, or the encoder pools and the head
                needs a row for each token.
        """
        super().__init__()
        keep_few_shapes()
        self.tokenizer, self.encoder, self.head = tokenizer, encoder, head
        self.prompts = {"query": "", "document": "", **(prompts or {})}
        self.default_prompt_name = default_prompt_name
        self.similarity_name = similarity_name or SIMILARITIES[head.kind][0]
        self.truncate_dim = truncate_dim
        self._follow_pooling()
        if isinstance(head, MultiVectorHead) and head.skip_ids is None:
            head.skip(tokenizer.ids(head.config.skiplist_words))
        head.to(next((weight.device for weight in encoder.parameters()), None))
        self.query_model: Pipeline | None = None
        self.tokens_per_step: int | None = None
        self.devices: list[torch.device] = []
        self.prompt_named(default_prompt_name)
        _check_dim("Model", truncate_dim, head.dim)
        if truncate_dim is not None and head.kind == "sparse":
            raise BadValueError(
                f"Model: truncate_dim {truncate_dim} of a sparse model, expected max_active_dims"
            )
        queries, _ = head.expand(Ragged.from_rows([[0]]), "query")
        if encoder.max_positions is not None and queries.max_length > encoder.max_positions:
            raise BadValueError(
                f"Model: queries are expanded to {queries.max_length} tokens, but the encoder has "
                f"{encoder.max_positions} positions"
            )
        limits = [limit for limit in (tokenizer.max_length, encoder.max_positions) if limit is not None]
        tokenizer.max_length = min(limits, default=None)
        for side in get_args(Side):
            tokenizer.check_length(head.max_length(side), f"{side}_length")

    def _follow_pooling(self) -> None:
        """Tell the head how many tokens are behind each row of the encoder."""
        if not isinstance(self.encoder, Encoder):
            return
        if any(self.encoder.config.schedule):
            check_pooling(self.encoder, self.head)
        if isinstance(self.head, MultiVectorHead):
            self.head.window = self.encoder.config.window

    @property
    def kind(self) -> str:
        """Kind of its representations: ``"dense"``, ``"multi_vector"`` or ``"sparse"``."""
        return self.head.kind

    @property
    def similarity_name(self) -> str:
        """How its vectors are compared; to be set to one of its kind."""
        return self._similarity_name

    @similarity_name.setter
    def similarity_name(self, name: str) -> None:
        known = SIMILARITIES[self.kind]
        if not isinstance(name, str) or name not in known:
            raise BadValueError(f"Model: similarity {shown(name)}, expected one of {', '.join(known)}")
        self._similarity_name = name

    def join_queries(self, parts: SideParts | None) -> None:
        """Let queries go through parts of their own; None lets them go the way of documents.

        Raises:
            BadValueError: Their vectors cannot be compared with those of documents.
        """
        if parts is None:
            self.query_model = None
            return
        queries = type(self)(**parts).to(self.device).eval()
        if isinstance(queries.head, StaticHead) and not bool(queries.head.weight[self.head.dim :].any()):
            queries.head.dim = self.head.dim  # tokens of no weight, or no tokens, are what makes it differ
        if (queries.kind, queries.head.dim) != (self.kind, self.head.dim):
            raise BadValueError(
                f"Model: queries become {queries.kind} of width {queries.head.dim}, documents {self.kind} of "
                f"width {self.head.dim}; expected the same"
            )
        if self.kind == "sparse":
            _check_terms(queries, self)
        self.query_model = queries

    def of(self, side: Side) -> Pipeline:
        """What texts of ``side`` go through: the query model for queries, if there is one."""
        return self if side == "document" or self.query_model is None else self.query_model

    @property
    def vocabulary(self) -> list[str]:
        """What each dimension of a sparse model stands for; a row without a token is ``[id]``.

        Raises:
            BadValueError: The model is not sparse.
        """
        if not isinstance(self.head, SparseHead | StaticHead):
            raise BadValueError(
                f"vocabulary: the model makes {self.kind} vectors, whose dimensions have no names"
            )
        own = self.head.vocabulary if isinstance(self.head, SparseHead) else None
        return list(own or self.tokenizer.tokens(self.head.dim))

    def pieces(self, text: str, side: Side) -> list[Piece]:
        """The tokens that a text of ``side`` becomes, with those of the prompt, and their places in it."""
        template = self.template(side)
        return self.of(side).tokenizer.pieces(text, template.prompt, template.max_length)

    @property
    def dim(self) -> int:
        """Width of its vectors."""
        return self.truncate_dim or self.head.dim

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        return next(self.parameters()).device

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that stand for weights, head and tokenizer, in whatever precision they run.

        And for how the encoder pools, if it does. Of a multi-vector model also for what is done to queries
        and to documents, prompts included; of a sparse one for what is done to documents, on which an index
        depends, see `query_fingerprint`.
        Computed from the weights at each call, 0.1 s for 20 million.
        """
        parts = f"{self.head!r} {self.tokenizer.signature}"
        if "document" in self.head.lengths:
            parts += f" {self.head.lengths['document']}"
        if self.kind != "dense":
            prompts = [self.prompts[side] for side in ("query", "document")]
            parts += f" {prompts[0]!r} {prompts[1]!r}" if self.kind == "multi_vector" else f" {prompts[1]!r}"
        if isinstance(self.encoder, Encoder) and any(self.encoder.config.schedule):
            sides = self.head.config.pooled_sides if isinstance(self.head, MultiVectorHead) else ()
            parts += f" {self.encoder.config.schedule} {sides}"
        digest = hashlib.blake2b(parts.encode(), digest_size=16)
        for name, weight in sorted(self.named_parameters()):
            if name.startswith("query_model."):
                continue
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            rounded = weight.detach().to("cpu", torch.bfloat16).contiguous()
            digest.update(rounded.view(torch.int16).numpy().data)
        return digest.hexdigest()

    @property
    def query_fingerprint(self) -> str:
        """As `fingerprint`, of what is done to queries where that is another matter; empty elsewhere."""
        if self.query_model is None and self.kind != "sparse":
            return ""
        own = "" if self.query_model is None else self.query_model.fingerprint
        parts = f"{self.prompts['query']!r} {own}"
        if "query" in self.of("query").head.lengths:
            parts += f" {self.of('query').head.lengths['query']}"
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()

    def prompt_named(self, name: str | None) -> str:
        """What is written before a text; nothing for None.

        Raises:
            BadValueError: There is no prompt of that name.
        """
        if name is not None and (not isinstance(name, str) or name not in self.prompts):
            raise BadValueError(
                f"Model: no prompt is named {shown(name)}, there are " + ", ".join(self.prompts)
            )
        return self.prompts[name] if name is not None else ""

    def max_length(self, side: Side) -> int | None:
        """Tokens at which texts of ``side`` are cut; None is nowhere."""
        model = self.of(side)
        wished, most = model.head.max_length(side), model.encoder.max_positions
        return model.tokenizer.max_length if wished is None else min(wished, most or wished)

    def set_length(self, side: Side, length: int) -> None:
        """Cut texts of ``side`` at ``length`` tokens, special tokens included; it is saved with the model.

        Raises:
            BadTypeError: The length is no whole number.
            BadValueError: That leaves no room for the text, or there is no such side.
            ConfigError: Queries are expanded to more tokens.
        """
        if not isinstance(side, str) or side not in get_args(Side):
            raise BadValueError(f"set_length: side {shown(side)}, expected {' or '.join(get_args(Side))}")
        part = self.of(side)
        part.tokenizer.check_length(length, f"{side}_length")
        if isinstance(part.head, MultiVectorHead):
            settings = part.head.config.model_dump() | {f"{side}_length": length}
            part.head.config = MultiVectorConfig.parse(settings, "multi-vector model")
        elif part is not self and isinstance(part.encoder, NoEncoder):  # only its tokenizer is saved
            part.tokenizer.max_length = length
        else:
            part.head.lengths = {**part.head.lengths, side: length}

    def _query_length(self) -> int | None:
        """Where queries are cut if that was said of them alone."""
        part = self.of("query")
        if part is self or not isinstance(part.encoder, NoEncoder):
            return part.head.lengths.get("query")
        own = part.tokenizer.max_length
        return None if own == self.tokenizer.max_length else own

    def template(self, side: Side, prompt: str | None = None) -> Template:
        """How texts of ``side`` become tokens: with the prompt of its name, unless another is given."""
        prompt = self.prompt_named(side) if prompt is None else prompt
        return Template(side, prompt, self.of(side).tokenizer.prompt_length(prompt), self.max_length(side))

    def tokenize(self, texts: Iterable[str], template: Template) -> Ragged:
        """Token ids of texts, Ragged int64 on the CPU."""
        return self.of(template.side).tokenizer(texts, template.prompt, template.max_length)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(  # noqa: D102
            self, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
        ) -> Representation: ...

    def forward(self, tokens: Ragged, prompt_length: int = 0, side: Side = "document") -> Representation:
        """Encode token ids, with gradients: what training runs.

        Args:
            tokens: Ragged int64 on the device of the model.
            prompt_length: Leading tokens of each row that are the prompt.
            side: What the texts are.
        """
        model = self.of(side)
        tokens, attended = model.head.expand(tokens, side)
        hidden = hidden_states(model.encoder, model.head, tokens, attended, side)
        return model.head(hidden, tokens, prompt_length, side)

    def encode_tokens(
        self,
        tokens: Ragged,
        template: Template,
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> Representation:
        """What the head makes of token ids, without gradients: float32 on the CPU, in order.

        Args:
            tokens: Ragged int64 on the CPU.
            template: What made them.
            batch_size: Most rows encoded at once, beside `tokens_per_step`.
            progress: Called with the number of rows finished since its last call.

        Raises:
            BadValueError: Numbers are infinite or none.
        """
        one_thread_after_fork()
        return self._begin(tokens, template, batch_size, progress)()

    def _begin(
        self, tokens: Ragged, template: Template, batch_size: int | None, progress: Progress | None
    ) -> Callable[[], Representation]:
        """As `encode_tokens`; the function that comes back waits for the GPU, if there is one."""
        model = self.of(template.side)
        if isinstance(model.encoder, NoEncoder):
            part = model._looked_up(tokens, template)
            if progress is not None:
                progress(len(part))
            return lambda: part
        model.eval()
        budget = _BUDGET.get(self.device.type, _BUDGET["cpu"])
        if isinstance(model.encoder, Encoder) and model.head.pools(template.side):
            _, stride = model.encoder.config.window
            budget *= min(stride, _MORE)
        finish = begin_tokens(
            model.encoder,
            model.head,
            tokens,
            template,
            budget=self.tokens_per_step or budget,
            batch_size=batch_size,
            progress=progress,
        )
        return lambda: _finite(finish())

    def _looked_up(self, tokens: Ragged, template: Template) -> Representation:
        """Without an encoder all rows are done at once, in no time."""
        with torch.inference_mode():
            part = self.head(tokens, tokens, template.prompt_length, template.side)
        return part.to("cpu", torch.float32)

    def encode_stream(
        self,
        texts: Iterable[str],
        template: Template,
        *,
        chunk_size: int = _CHUNK,
        batch_size: int | None = None,
        progress: Progress | None = None,
        device: Device | None = None,
    ) -> Iterator[Representation]:
        """What the head makes of texts, in chunks; the next one is tokenized while one is encoded.

        Args:
            texts: Read as they are needed.
            template: How they become tokens, see `template`.
            chunk_size: Texts read, tokenized and sorted by length together.
            batch_size: Most texts encoded at once, beside `tokens_per_step`.
            progress: Called with the number of texts finished since its last call.
            device: Move the model there first; or several, each of which gets a process of its own.

        Yields:
            The rows of each ``chunk_size`` texts; one part without rows if there are no texts.
        """
        check_functions("encode", progress=progress)
        pieces = chunks(strings(texts), chunk_size)
        if isinstance(self.of(template.side).encoder, NoEncoder) and isinstance(device, Sequence):
            device = None  # there is nothing to deal out
        empty = True
        if device is None or isinstance(device, str | torch.device):
            if device is not None:
                self.to(find_device(device))
            tokenized = ahead(partial(self.tokenize, template=template), pieces)
            begun = (self._begin(tokens, template, batch_size, progress) for tokens in tokenized)
            for part in behind(begun, by=self.device.type == "cuda"):
                empty = False
                yield part
        else:
            for part in encode_in_processes(self, find_devices(device), pieces, template, batch_size):
                empty = False
                yield part
                if progress is not None:
                    progress(len(part))
        if empty:
            yield self.encode_tokens(self.tokenizer([]), template)

    def represent(self, texts: Iterable[str], side: Side, progress: Progress | None = None) -> Representation:
        """Encode texts for an index or a search.

        Args:
            texts: Texts.
            side: ``"query"`` or ``"document"``; decides the prompt and what else the head does to it.
            progress: Called with the number of texts finished since its last call.

        Returns:
            A row a text in order, float32 on the CPU, such that `irkit.score` is the similarity of the
            model: for cosine, vectors have length 1; for meanmaxsim, those of queries are divided by their
            number.

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
        if self.similarity_name not in ("cosine", "dot", "maxsim", "meanmaxsim"):
            raise BadValueError(
                f"represent: the similarity of the model is {self.similarity_name}, no inner product; "
                "use encode and similarity"
            )
        if device is None and len(self.devices) > 1:
            texts = iter(texts)
            first = list(islice(texts, max(0, chunk_size) + 1))
            texts, device = chain(first, texts), self.devices if len(first) > chunk_size else None
        template = self.template(side)
        stream = self.encode_stream(texts, template, chunk_size=chunk_size, progress=progress, device=device)
        for part in stream:
            done = self.finished(part, self.truncate_dim, self.similarity_name == "cosine")
            mean = self.similarity_name == "meanmaxsim" and side == "query"
            yield averaged(done) if mean and isinstance(done, MultiVector) else done

    def represent_with_tokens(self, text: str, side: Side) -> tuple[MultiVector, list[Piece]]:
        """Token vectors of one text, without token pooling, and the token that each belongs to.

        Where the encoder pools, a vector belongs to a window of tokens, which is one piece then.

        Args:
            text: A text.
            side: ``"query"`` or ``"document"``.

        Returns:
            One row, as `represent` gives it; and as many pieces as it has vectors.

        Raises:
            BadTypeError: ``text`` is not a string.
            BadValueError: The model does not make token vectors.
        """
        model = self.of(side)
        if not isinstance(model.head, MultiVectorHead):
            raise BadValueError(f"represent_with_tokens: the model makes {self.kind}, not a vector a token")
        model.eval()
        template = self.template(side)
        tokens, attended = model.head.expand(self.tokenize([text], template), side)
        pieces = self.pieces(text, side)
        for number in tokens.values[len(pieces) :].tolist():
            token = str(model.tokenizer.backend.id_to_token(number))
            pieces.append(Piece(token, len(text), len(text)))
        with torch.inference_mode():
            there = tokens.to(self.device)
            hidden = hidden_states(model.encoder, model.head, there, attended, side)
            vectors = model.head.token_vectors(hidden, there, side)
            kept = model.head.kept(there, side)
            spans = model.head.spans(there, side).values[kept].tolist()
        row = self.finished(MultiVector(vectors.to("cpu")), self.truncate_dim, False)
        assert isinstance(row, MultiVector)
        if self.similarity_name == "meanmaxsim" and side == "query":
            row = averaged(row)
        return row, [_joined(pieces[start:end]) for start, end in spans]

    def finished(self, representation: Representation, dim: int | None, unit: bool) -> Representation:
        """Cut vectors, and scale them to length 1 where asked, or to their own where the head has them of 1.

        Args:
            representation: What the head made.
            dim: Leading dimensions that are kept; None is all. Sparse weights are never cut.
            unit: Whether they get length 1.

        Raises:
            BadValueError: ``dim`` is below 1 or above the width of the vectors.
        """
        _check_dim("encode", dim, self.head.dim)
        if isinstance(representation, Dense):
            values = representation.values[:, :dim].contiguous()
            return Dense(F.normalize(values, dim=1) if unit else values)
        if isinstance(representation, MultiVector) and (unit or (dim or self.head.dim) < self.head.dim):
            rows, values = representation.tokens, representation.tokens.values[:, :dim].contiguous()
            if unit:
                values = F.normalize(values, dim=1)
            elif isinstance(self.head, MultiVectorHead) and self.head.unit:  # but for what was pooled
                values = F.normalize(values, dim=1) * rows.values.norm(dim=1, keepdim=True)
            return MultiVector(rows.with_values(values))
        if isinstance(representation, Sparse) and unit:
            return unit_length(representation)
        return representation


def _finite(made: Representation) -> Representation:
    """The same, or an error about what no index takes and no score can be made of."""
    if isinstance(made, Dense):
        values = made.values
    else:
        values = made.weights if isinstance(made, Sparse) else made.tokens.values
    if not math.isfinite(values.sum().item()) and not values.isfinite().all():  # a sum may be too large
        raise BadValueError(
            "encode: the model gives NaN or infinite values; its weights are damaged, or do not fit its dtype"
        )
    return made


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Neighbouring tokens as one, at the places of those that are in the text."""
    inside = [piece for piece in pieces if piece.start < piece.end] or pieces[:1]
    return Piece(" ".join(piece.token for piece in pieces), inside[0].start, inside[-1].end)


def _check_dim(operation: str, dim: int | None, width: int) -> None:
    if dim is not None and (not is_count(dim) or dim > width):
        raise BadValueError(
            f"{operation}: truncate_dim is {shown(dim)}; expected a whole number from 1 to {width}, the "
            "width of the vectors, or None for all of it"
        )


def _check_terms(queries: Pipeline, documents: Pipeline) -> None:
    """Raise BadValueError unless either side means the same by each dimension, special tokens aside."""
    special = {*queries.tokenizer.special_tokens(), *documents.tokenizer.special_tokens()}
    for number, (query, document) in enumerate(zip(queries.vocabulary, documents.vocabulary, strict=True)):
        if query != document and number not in special:
            raise BadValueError(
                f"Model: term {number} is {query!r} for queries and {document!r} for documents; expected one "
                "vocabulary"
            )
