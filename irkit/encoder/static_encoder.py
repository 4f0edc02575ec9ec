"""An encoder that looks the vector of each token up, whatever is beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.core.ragged import Ragged, to_device
from irkit.errors import CorruptError
from irkit.tokenizer import read_optional
from irkit.utils.weights import read_weights, write_weights

MODEL2VEC = "model2vec"  # model_type in config.json
_OURS, _THEIRS = "embedding.weight", "embeddings"  # names of sentence-transformers and of model2vec


class StaticEncoder(nn.Module):
    """Gives each token its row of a matrix as its hidden state: model2vec and StaticEmbedding.

    Attributes:
        family: ``"static"``.
        settings: Keys of ``config.json`` of model2vec; empty for a StaticEmbedding.
        head_weights: Always empty: such checkpoints have no task heads.
        unknown: Id of a token that is left out of a text, as model2vec does; None leaves no token out.
        max_positions: None: rows of any length pass.

    Source: StaticModel of model2vec 0.10; StaticEmbedding of sentence-transformers 6.2.
    """

    family: ClassVar[str] = "static"
    max_positions: ClassVar[int | None] = None

    def __init__(
        self, rows: Tensor, *, settings: Mapping[str, Any] | None = None, unknown: int | None = None
    ) -> None:
        """Make an encoder of ``rows (vocab_size, width)``."""
        super().__init__()
        self.word = nn.Embedding(len(rows), rows.shape[1], _weight=rows)
        self.settings: Any = dict(settings or {})
        self.unknown = unknown
        self.head_weights: dict[str, Tensor] = {}

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> StaticEncoder:
        """Load the weights of model2vec or of a StaticEmbedding, in evaluation mode and float32.

        The rows that model2vec shares between tokens (``mapping``) and the weights of tokens (``weights``)
        become part of one row per token.

        Raises:
            StorageError: The directory has no weight file.
            CorruptError: Weights are missing, left over, or of other shapes.
        """
        folder = Path(directory)
        tensors = read_weights(folder)
        name = _OURS if _OURS in tensors else _THEIRS
        rows, mapping = tensors.pop(name, None), tensors.pop("mapping", None)
        weights = tensors.pop("weights", None)
        if rows is None or rows.dim() != 2 or tensors:
            shape = None if rows is None else tuple(rows.shape)
            raise CorruptError(
                f"loading {folder}: {_OURS} or {_THEIRS} of shape {shape}, and {', '.join(tensors) or 'no'} "
                "other weights; expected one matrix of static embeddings, with mapping and weights at most"
            )
        rows = rows.float()
        if mapping is not None:
            if mapping.dim() != 1 or (
                len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(rows)
            ):
                raise CorruptError(f"loading {folder}: mapping names other rows than 0 to {len(rows) - 1}")
            rows = rows[mapping.long()]
        if weights is not None:
            if weights.shape != rows.shape[:1]:
                raise CorruptError(
                    f"loading {folder}: weights {tuple(weights.shape)}, not {len(rows)}, one for each token"
                )
            rows = rows * weights.float()[:, None]
        settings = {} if name == _OURS else read_optional(folder / "config.json") | {"model_type": MODEL2VEC}
        return cls(rows.contiguous(), settings=settings).eval()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the weights, and config.json for a model of model2vec."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        rows = self.word_embeddings.detach()
        write_weights(folder, {_THEIRS if self.settings else _OURS: rows})
        if self.settings:
            settings = {
                key: value for key, value in self.settings.items() if key != "vocabulary_quantization"
            }
            settings["embedding_dtype"] = str(rows.dtype).removeprefix("torch.")
            (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.word_embeddings.shape[1])

    @property
    def word_embeddings(self) -> nn.Parameter:
        """The matrix ``(vocab_size, width)`` with a row for each token."""
        return cast(nn.Parameter, self.word.weight)

    def grow_(self, vocab_size: int) -> None:
        """Extend the matrix to ``vocab_size`` rows, in place; new rows are the mean of the old rows."""
        old = self.word_embeddings.detach()
        if vocab_size > len(old):
            self.set_embeddings_(torch.cat([old, old.mean(0).expand(vocab_size - len(old), -1)]), {})

    def set_embeddings_(self, rows: Tensor, special_ids: Mapping[str, int]) -> None:
        """Replace the values of the matrix, in place. ``special_ids`` are not read."""
        self.word_embeddings.data, self.word.num_embeddings = rows, len(rows)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged: ...  # noqa: D102

    def forward(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged:
        """Look token ids up: Ragged ``(total', width)``, without the tokens that are unknown.

        Args:
            tokens: Ragged int64 ``(total,)``.
            attended: Ignored: no token depends on another one.
        """
        if self.unknown is not None:
            known = tokens.host().values != self.unknown  # compared on the CPU: no wait for a GPU
            sums = F.pad(known.cumsum(0), (1, 0))
            ends = tokens.lengths.cumsum(0)
            positions = to_device(known.nonzero()[:, 0], tokens.device)
            tokens = Ragged(tokens.values[positions], sums[ends] - sums[ends - tokens.lengths])
        return tokens.with_values(F.embedding(tokens.values, self.word_embeddings))
