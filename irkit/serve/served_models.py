"""Encode and score texts of many requests together with one model."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, cast

import torch

from irkit.core.ragged import Ragged
from irkit.core.representation import Representation, Several, concat
from irkit.core.scoring import score
from irkit.errors import IrkitError
from irkit.heads import Side
from irkit.model import Model
from irkit.model.cross_encoder import CrossEncoder, PairTokens
from irkit.model.pipeline import Pipeline, plan_steps
from irkit.retrieval.fusing import compare_several
from irkit.serve.batcher import Batcher
from irkit.serve.meters import TOKENS
from irkit.serve.problems import Problem
from irkit.serve.serve_config import ServeLimits
from irkit.tokenizer import Tokenizer

Kind = Literal["dense", "multi_vector", "sparse", "several", "cross_encoder"]
_UNCUT = 1 << 30  # tokens: longer than any text


class Encoded(NamedTuple):
    """Rows of texts, and the number of tokens that were encoded."""

    rows: Representation
    tokens: int


class ServedModel:
    """A model by name, with a queue of its own.

    Attributes:
        name: Name in requests.
        kind: Kind of its representations; ``"cross_encoder"`` scores pairs and makes none.
        indexes: Names of the indexes that it encodes for.
        heads: For a model with several heads, each as a model named ``NAME/HEAD``; all share its queue.
    """

    def __init__(
        self, name: str, model: Model | CrossEncoder, limits: ServeLimits, batcher: Batcher | None = None
    ) -> None:
        self.name, self.model, self.limits = name, model, limits
        self.indexes: list[str] = []
        self.kind: Kind = "cross_encoder" if isinstance(model, CrossEncoder) else model.kind  # type: ignore[assignment]
        run = self._score_pairs if isinstance(model, CrossEncoder) else _encode
        self.batcher = batcher or Batcher(f"model {name}", run, limits.batch_tokens, limits.waiting_tokens)
        heads = model.heads if isinstance(model, Model) and self.kind == "several" else {}
        self.heads = {
            head: ServedModel(f"{name}/{head}", part, limits, self.batcher) for head, part in heads.items()
        }

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer without special tokens; making it takes long."""
        return self.retriever_model().tokenizer.without_special_tokens()

    @property
    def max_length(self) -> int | None:
        """Number of tokens at which documents are cut."""
        model = self.model
        return model.max_length if isinstance(model, CrossEncoder) else model.max_length("document")

    def of_kind(self, kind: Kind | None) -> ServedModel:
        """Return the first head that makes representations of a kind; the model itself if none does."""
        return next((head for head in self.heads.values() if head.kind == kind), self)

    def retriever_model(self, kind: Kind | None = None) -> Model:
        """Return the model.

        Raises:
            Problem: It is of another kind.
        """
        if isinstance(self.model, CrossEncoder) or kind not in (None, self.kind):
            raise Problem(
                422, f"model {self.name} is of kind {self.kind}, expected {kind or 'one that encodes'}"
            )
        return self.model

    async def encode(
        self, texts: Sequence[str], prompt_name: str | None = None, *, cut: bool = True
    ) -> Encoded:
        """Encode texts as `irkit.Model.encode` does.

        Args:
            texts: Texts.
            prompt_name: ``"query"`` or ``"document"`` is the side of the texts; another name is a prompt of
                the model; None is its default prompt.
            cut: Whether long texts are cut; else they are refused.

        Raises:
            Problem: There are too many tokens, or too much is waiting, or the model has failed.
            BadValueError: No prompt has this name.
        """
        model, side = self.retriever_model(), _side(prompt_name)
        pipeline = model.encoding_pipeline(side, prompt_name=prompt_name)
        # tokens are made here, by threads beside the event loop, so that the model gets only numbers
        tokens = await asyncio.to_thread(self._tokenize, pipeline, texts, cut)
        total = self._total(tokens.lengths)
        parts, order = [(tokens, total)], None
        if total > self.limits.batch_tokens:
            steps = plan_steps(tokens.lengths, self.limits.batch_tokens)
            parts = [(tokens[step], int(tokens.lengths[step].sum())) for step in steps]
            order = torch.argsort(torch.cat(steps))
        rows = await self.batcher.submit((self, side, pipeline.prompt), parts)
        TOKENS.labels(self.name).inc(total)
        return Encoded(rows[0] if order is None else concat(rows)[order], total)

    async def represent(self, texts: Sequence[str], side: Side, *, cut: bool = True) -> Encoded:
        """Encode texts so that `irkit.score` of the rows is the similarity of the model."""
        rows, tokens = await self.encode(texts, side, cut=cut)
        return Encoded(self.retriever_model().comparable(rows, side), tokens)

    async def score(self, query: str, texts: Sequence[str], *, cut: bool = True) -> tuple[list[float], int]:
        """Score texts for a query; return the scores and the number of tokens that were read.

        Args:
            query: Query.
            texts: Texts.
            cut: Whether long texts are cut; else they are refused.

        Raises:
            Problem: There are too many tokens, or too much is waiting, or the model has failed.
        """
        if isinstance(self.model, CrossEncoder):
            self._check_pairs(query, texts)
            rows = await asyncio.to_thread(self._tokenize_pairs, query, texts, cut)
            lengths = torch.tensor([len(ids) for ids in rows["input_ids"]])
            total = self._total(lengths)
            steps = plan_steps(lengths, self.limits.batch_tokens)
            parts = [
                ({key: [values[i] for i in step] for key, values in rows.items()}, int(lengths[step].sum()))
                for step in steps
            ]
            scored = await self.batcher.submit("pairs", parts)
            TOKENS.labels(self.name).inc(total)
            scores = torch.empty(len(texts))
            scores[torch.cat(steps)] = torch.cat(scored)
            return scores.tolist(), total
        queries, documents = await asyncio.gather(
            self.represent([query], "query", cut=cut), self.represent(texts, "document", cut=cut)
        )
        similarities = await asyncio.to_thread(_score, queries.rows, documents.rows)
        return similarities, queries.tokens + documents.tokens

    async def tokens(self, texts: Sequence[str], special: bool) -> list[list[dict[str, Any]]]:
        """Split texts into tokens as the model does, uncut; return them as TEI describes tokens.

        Args:
            texts: Texts.
            special: Whether special tokens are added.

        Raises:
            Problem: They have too many tokens.
        """
        tokenizer = self.retriever_model().tokenizer
        known = set(tokenizer.special_tokens())

        used = tokenizer if special else self._plain

        def split(text: str, ids: torch.Tensor) -> list[dict[str, Any]]:
            return [
                {"id": number, "text": span.token, "special": number in known}
                | {"start": span.start, "stop": span.end}
                for number, span in zip(ids.tolist(), used.token_spans(text, max_length=_UNCUT), strict=True)
            ]

        def split_all() -> list[list[dict[str, Any]]]:
            rows = used(texts, max_length=_UNCUT)
            self._total(rows.lengths)  # a token here takes a hundred times its bytes
            return [split(text, ids) for text, ids in zip(texts, rows, strict=True)]

        return await asyncio.to_thread(split_all)

    def _tokenize(self, pipeline: Pipeline, texts: Sequence[str], cut: bool) -> Ragged:
        tokens = pipeline.tokenize(texts)
        if not cut:
            lengths = pipeline.tokenizer(texts, pipeline.prompt, _UNCUT).lengths
            longest = int(lengths.max()) if len(lengths) else 0
            if longest > int(tokens.lengths[lengths.argmax()]):
                raise self._too_long(f"a text has {longest} tokens")
        return tokens

    def _tokenize_pairs(self, query: str, texts: Sequence[str], cut: bool) -> PairTokens:
        assert isinstance(self.model, CrossEncoder)
        pairs = [(query, text) for text in texts]
        if not cut:
            longest = max(map(len, self.model.tokenize(pairs, _UNCUT)["input_ids"]))
            if longest > self.model.max_length:
                raise self._too_long(f"query and text have {longest} tokens")
        return self.model.tokenize(pairs)

    def _check_pairs(self, query: str, texts: Sequence[str]) -> None:
        """Refuse a query that would take longer to split, once for each text, than the largest body."""
        total, most = len(query) * len(texts), self.limits.body_bytes
        if total > most:
            what = f"{self.name} reads a query of {len(query)} characters with each of {len(texts)} texts"
            limit = f"the limit is {most} characters in all; send a shorter query, or fewer texts"
            raise Problem(413, f"{what}; {limit}")

    def _too_long(self, what: str) -> Problem:
        limit = f"{what}, the limit of {self.name} is {self.max_length}"
        return Problem(413, f"{limit}; send shorter texts, or truncate: true")

    def _total(self, lengths: torch.Tensor) -> int:
        """Return the number of tokens of a request.

        Raises:
            Problem: There are too many.
        """
        total = int(lengths.sum())
        if total > self.limits.tokens:
            limit = f"{total} tokens in one request, the limit is {self.limits.tokens}"
            raise Problem(413, f"{limit}; send fewer or shorter texts")
        return total

    def _score_pairs(self, key: Hashable, jobs: list[PairTokens]) -> Sequence[torch.Tensor]:
        """Score the pairs of several requests with a cross-encoder."""
        assert isinstance(self.model, CrossEncoder)
        rows = {name: [row for job in jobs for row in job[name]] for name in jobs[0]}
        try:
            scores = torch.from_numpy(self.model.score_tokens(rows))
        except (IrkitError, RuntimeError) as error:
            raise Problem(424, f"model {self.name} failed: {error}") from error
        return torch.split(scores, [len(job["input_ids"]) for job in jobs])


def _encode(key: Hashable, parts: list[Ragged]) -> Sequence[Representation]:
    """Encode the tokens of several requests in one run; the key has a model, a side and a prompt."""
    served, side, prompt = cast(tuple[ServedModel, Side | None, str], key)
    pipeline = served.retriever_model().encoding_pipeline(side, prompt=prompt)
    try:
        rows = pipeline.encode_tokens(Ragged.concat(parts) if len(parts) > 1 else parts[0])
    except (IrkitError, RuntimeError) as error:
        raise Problem(424, f"model {served.name} failed: {error}") from error
    if len(parts) == 1:
        return [rows]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _side(prompt_name: str | None) -> Side | None:
    return prompt_name if prompt_name in ("query", "document") else None  # type: ignore[return-value]


@torch.inference_mode()
def _score(queries: Representation, documents: Representation) -> list[float]:
    compare: Any = score  # of two representations of one kind
    if isinstance(queries, Several):  # the sum over all heads
        compare = partial(compare_several, weights=None)
    return [float(value) for value in compare(queries, documents)[0]]
