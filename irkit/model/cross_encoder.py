"""The `CrossEncoder`: a transformer that reads query and document together and scores the pair."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from irkit.arguments import brief
from irkit.data import Document, Query
from irkit.encoder.adapter import longest_row
from irkit.encoder.adapter_loading import load_transformers
from irkit.errors import (
    BadTypeError,
    BadValueError,
    ConfigError,
    CorruptError,
    IrkitError,
    StorageError,
    require,
)
from irkit.model.hub import local_directory

Array: TypeAlias = np.ndarray[Any, Any]
Activation: TypeAlias = Literal["none", "sigmoid"]
PairTokens: TypeAlias = dict[str, list[list[int]]]


class CrossEncoder:
    """Scores pairs with a transformer that reads query and document together (Nogueira and Cho 2019).

    Args:
        name: Directory or hub name of a sequence classifier with one or two labels. With two labels, the
            score is the log odds of the second.
        device: Device of the model; None is a GPU if there is one, else the CPU.
        dtype: Type of the weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_length: Largest number of tokens of a pair. In a longer pair, the longer text is cut. None is the
            limit of the model.
        activation: ``"none"`` returns logits, which margins and KL divergence are defined on; ``"sigmoid"``
            returns probabilities.
        batch_tokens: Largest number of tokens in one forward pass, padding included.

    Raises:
        StorageError: The model does not exist, or cannot be read.
        ConfigError: transformers cannot build what its ``config.json`` says.
        CorruptError: Weights are missing, of another shape, or no numbers.
        BadValueError: The model is not a classifier with one or two labels, or a setting is unknown.

    Source: https://arxiv.org/abs/1901.04085
    """

    def __init__(
        self,
        name: str,
        *,
        device: str | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        activation: Activation = "none",
        batch_tokens: int = 8192,
    ) -> None:
        transformers = require("transformers", "train", "A cross-encoder")
        # check the settings
        precisions = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
        for setting, value, known in (
            ("dtype", dtype, precisions),
            ("activation", activation, get_args(Activation)),
        ):
            if value not in known:
                raise BadValueError(f"cross-encoder: {setting} {value!r}; expected {' or '.join(known)}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.activation, self.batch_tokens = activation, batch_tokens
        # load configuration and tokenizer, and check that it is a classifier of pairs
        try:
            directory = local_directory(name)
            config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
            architectures = [*map(str, config.architectures or ())]
        except Exception as error:  # whatever goes wrong inside transformers
            raise StorageError(f"loading the cross-encoder {name}: {error}") from error
        if config.num_labels not in (1, 2) or "Classif" not in " ".join(architectures):
            raise BadValueError(
                f"cross-encoder {name}: it is {' '.join(architectures) or config.model_type} with "
                f"{config.num_labels} labels; expected a sequence classifier with 1 or 2, such as "
                "cross-encoder/ms-marco-MiniLM-L6-v2"
            )
        # load the model
        with _quiet(transformers.utils.logging):
            model = load_transformers("AutoModelForSequenceClassification", directory, precisions[dtype])
        self.model = model.to(self.device)
        if len(self.tokenizer) > (rows := model.get_input_embeddings().weight.shape[0]):
            raise CorruptError(
                f"loading the cross-encoder {name}: its tokenizer has {len(self.tokenizer):,} tokens, "
                f"the model embeddings of {rows:,}; they are not of one model"
            )
        # the shortest limit on the length counts
        limits = (self.tokenizer.model_max_length, longest_row(model))
        lengths = [limit for limit in (max_length, *limits) if limit is not None]
        if unfit := [limit for limit in lengths if not isinstance(limit, int | float) or limit < 4]:
            raise BadValueError(
                f"cross-encoder {name}: a pair is cut to {unfit[0]!r:.60} tokens; expected a number from 4 on"
            )
        self.max_length, self.name = int(min(lengths)), name
        self._lock = threading.Lock()  # the tokenizer keeps the length of its last call
        if model.config.pad_token_id is None:  # of a decoder, which looks for the last token before it
            model.config.pad_token_id = self.tokenizer.pad_token_id
        try:  # two pairs of different length, so that a model that cannot run is refused now
            self([Query("query", "a")], [[Document("one", "a"), Document("two", "a a a")]])
        except IrkitError:
            raise
        except Exception as error:  # whatever goes wrong inside transformers
            raise ConfigError(
                f"loading the cross-encoder {name}: transformers cannot run it: {error}"
            ) from error

    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """Score the documents of each query, see `irkit.retrieval.scorer.Scorer`."""
        check_scorable(queries, documents)
        pairs = [
            (query.text, document.full_text)
            for query, candidates in zip(queries, documents, strict=True)
            for document in candidates
        ]
        scores = self.score_tokens(self.tokenize(pairs)) if pairs else np.empty(0, np.float32)
        ends = np.cumsum([len(candidates) for candidates in documents])
        return np.split(scores, ends[:-1])

    def tokenize(self, pairs: Sequence[tuple[str, str]], max_length: int | None = None) -> PairTokens:
        """Return the inputs of the model by name, such as ``"input_ids"``, each with a list for every pair.

        Args:
            pairs: One or more pairs of a query and a text.
            max_length: Largest number of tokens of a pair; None takes the model's.
        """
        queries, texts = ([pair[side] for pair in pairs] for side in (0, 1))
        most = self.max_length if max_length is None else max_length
        with self._lock:
            return dict(
                self.tokenizer(queries, texts, truncation="longest_first", max_length=most, verbose=False)
            )

    @torch.inference_mode()
    def score_tokens(self, rows: PairTokens) -> Array:
        """Return ``(n,)`` float32 scores of the pairs that `tokenize` returned.

        Raises:
            CorruptError: A score is infinite or not a number.
        """
        lengths = np.array([len(row) for row in rows["input_ids"]])
        scores = np.empty(len(lengths), np.float32)
        for batch in _batches(lengths, self.batch_tokens):
            chosen = {key: [values[i] for i in batch] for key, values in rows.items()}
            inputs = self.tokenizer.pad(chosen, return_tensors="pt").to(self.device)
            logits = self.model(**inputs).logits
            values = (logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]).float()
            scores[batch] = (values.sigmoid() if self.activation == "sigmoid" else values).cpu().numpy()
        if not np.isfinite(scores).all():
            raise CorruptError(
                f"cross-encoder {self.name}: a score is infinite or not a number; its weights are damaged, "
                "or too large for their type"
            )
        return scores


def check_scorable(queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> None:
    """Check the arguments of a scorer: queries, and one sequence of documents for each.

    Raises:
        BadTypeError: An item is not a `Query` or a `Document`.
        BadValueError: The numbers of queries and of sequences differ.
    """
    lists = list(documents)
    if len(queries) != len(lists):
        raise BadValueError(
            f"scoring: got {len(queries)} queries and documents of {len(lists)}; expected those of each query"
        )
    items = chain.from_iterable([line] if isinstance(line, str | Document) else line for line in lists)
    for kind, values in ((Query, queries), (Document, items)):
        wrong = next((value for value in values if not isinstance(value, kind)), None)
        if wrong is not None:
            name = kind.__name__
            raise BadTypeError(
                f"scoring: got {brief(wrong)}, expected a {name}, such as irkit.data.{name}('1', 'a text')"
            )


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Hide the progress bar of transformers inside the block; it would appear even without a terminal.

    ``logging`` is the module ``transformers.utils.logging``.
    """
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _batches(lengths: Array, batch_tokens: int) -> Iterator[list[int]]:
    """Yield the positions of texts in batches, the longest first, so that batches need little padding.

    Each batch has at most ``batch_tokens`` tokens, padding included, or one text.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + size]
        start += size
