"""Run any other transformers model with the interface of `Encoder`: rows are packed, padded or run alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from irkit.config import read_json
from irkit.core.ragged import Ragged
from irkit.encoder.adapter_loading import load_transformers
from irkit.encoder.attention import attend, check_lengths, leading, pick_backend
from irkit.errors import ConfigError, reraise_as

_BACKEND = "irkit_packed"
_CHECKED = (3, 40, 9, 1, 17)  # lengths of the rows that are checked at loading
_WINDOW = 6  # attention window during the check, so that the rows are longer than it
_BY_LENGTH = ("dynamic", "longrope")  # rotary positions that depend on the longest row of a batch
# rows, positions of the keys if not all, and attention backend of the forward pass that this thread runs
_rows: ContextVar[tuple[Ragged, Ragged | None, str]] = ContextVar("rows")


class TransformersEncoder(nn.Module):
    """An encoder that runs transformers' own code, for an architecture outside `irkit.encoder.families`.

    The result for a row does not depend on the other rows of the batch. Rows run in one of three ways: packed
    without padding, if the model lets its attention be replaced; padded; or alone, one row at a time, if
    padding changes the result, as in ConvBERT or FNet. A check at loading runs five short rows and takes the
    first way that gives each row the result that it has alone.

    Attributes:
        whole: The transformers model, with the decoder where it has one.
        model: The encoder of ``whole``.
        packed: Whether rows are packed.
        alone: Whether each row runs by itself.
        family: ``model_type`` of its configuration.
        max_positions: Longest row that the position embeddings allow; None is any length.
        decoder: The last layer of a masked language model, if `load_decoder_` loaded it; the hidden states
            are then the inputs of this layer.
    """

    def __init__(self, model: Any, *, attention: str = "auto") -> None:
        super().__init__()
        self.whole: Any = model
        self.settings: Any = model.config
        self.model: Any = self.whole.get_encoder() if self.settings.is_encoder_decoder else self.whole
        self.family = str(self.settings.model_type)
        self.attention = attention
        self.head_weights: dict[str, Tensor] = {}
        self.decoder: nn.Linear | None = None
        self.max_positions = longest_row(self.model)
        self.packed, self.alone = self._choose()

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: torch.dtype = torch.float32, attention: str = "auto"
    ) -> TransformersEncoder:
        """Load a directory through ``transformers.AutoModel``; code inside the directory is never run.

        An encoder that was saved without the decoder of its architecture, such as a ``T5EncoderModel``, is
        loaded through ``AutoModelForTextEncoding``.

        Raises:
            ConfigError: transformers does not know the architecture, or cannot run it.
            CorruptError: Weights are missing, left over, of another shape, or no numbers.
        """
        architectures = read_json(Path(directory) / "config.json").get("architectures") or ()
        is_half = any(str(name).endswith("EncoderModel") for name in architectures)
        kind = "AutoModelForTextEncoding" if is_half else "AutoModel"
        return cls(load_transformers(kind, directory, dtype), attention=attention)

    def load_decoder_(self) -> nn.Linear:
        """Load the checkpoint again, as a masked language model.

        From then on the encoder returns the hidden states that are the input of this model's decoder.

        Returns:
            The decoder ``(hidden_size, V)``; it is saved with the encoder.

        Raises:
            ConfigError: The checkpoint is not a masked language model, or its logits are not hidden states
                times one matrix.
        """
        dtype = next(self.parameters()).dtype
        self.whole = self.model = load_transformers("AutoModelForMaskedLM", self.whole.name_or_path, dtype)
        self.settings = self.whole.config
        decoder, ids = self.whole.get_output_embeddings(), torch.arange(5, 9)[None]
        if not isinstance(decoder, nn.Linear):
            raise ConfigError(f"loading {self.whole.name_or_path}: a {self.family} without a decoder matrix")
        with torch.no_grad():
            logits = self.whole(input_ids=ids).logits
            decoder.forward = _same  # type: ignore[method-assign, assignment]
            hidden = self.whole(input_ids=ids).logits
        alike = hidden.shape[-1] == decoder.in_features and torch.allclose(
            nn.functional.linear(hidden, decoder.weight, decoder.bias), logits, rtol=1e-3, atol=1e-4
        )
        if not alike:
            raise ConfigError(
                f"loading {self.whole.name_or_path}: the logits of a {self.family} are more than a product "
                "with its decoder matrix, which irkit cannot run"
            )
        self.decoder = decoder
        self.packed, self.alone = self._choose()
        return decoder

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model to a directory as transformers does, the decoder included if there is one."""
        self.whole.save_pretrained(str(directory))

    def grow_(self, vocab_size: int) -> None:
        """Extend the word embeddings to ``vocab_size`` rows, in place, see `Encoder.grow_`."""
        old = int(self.settings.vocab_size)
        if vocab_size > old:
            weight = self.whole.resize_token_embeddings(vocab_size, mean_resizing=False).weight
            with torch.no_grad():
                weight[old:] = weight[:old].mean(0)

    def set_embeddings_(self, rows: Tensor, special_ids: Mapping[str, int]) -> None:
        """Replace the word embeddings, see `Encoder.set_embeddings_`."""
        self.word_embeddings.data = rows
        self.settings.update({**special_ids, "vocab_size": len(rows)})
        self.whole.get_input_embeddings().num_embeddings = len(rows)
        if self.decoder is not None:
            self.decoder.out_features = len(rows)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.packed:  # in another process: transformers does not know our attention there yet
            _register()

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.settings.hidden_size) if self.decoder is None else self.decoder.in_features

    @property
    def word_embeddings(self) -> nn.Parameter:
        """The matrix ``(vocab_size, width)`` with a row for each token."""
        weight: nn.Parameter = self.whole.get_input_embeddings().weight
        return weight

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged: ...  # noqa: D102

    def forward(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged:
        """Encode token ids ``(total,)`` to hidden states ``(total, hidden_size)``, as `Encoder` does.

        Raises:
            BadValueError: A row is longer than the position embeddings.
        """
        check_lengths(tokens, self.max_positions)
        if not len(tokens.values):
            return tokens.with_values(torch.zeros(0, self.hidden_size, device=tokens.device))
        run = self._run_packed if self.packed else self._run_alone if self.alone else self._run_padded
        return tokens.with_values(run(tokens, attended))

    def _run_padded(self, tokens: Ragged, attended: Tensor | None = None) -> Tensor:
        pad = getattr(self.settings, "pad_token_id", None) or 0
        ids, mask = tokens.to_padded(pad if 0 <= pad < len(self.word_embeddings) else 0)
        seen = mask
        if attended is not None:
            seen = torch.arange(ids.shape[1], device=ids.device) < attended.to(ids.device)[:, None]
        return self._hidden(self.model(input_ids=ids, attention_mask=seen.long()))[mask]

    def _run_alone(self, tokens: Ragged, attended: Tensor | None = None) -> Tensor:
        rows = [slice(i, i + 1) for i, length in enumerate(tokens.lengths.tolist()) if length]
        return torch.cat(
            [self._run_padded(tokens[row], None if attended is None else attended[row]) for row in rows]
        )

    def _hidden(self, output: Any) -> Tensor:
        hidden: Tensor = output.last_hidden_state if self.decoder is None else output.logits
        return hidden

    def _run_packed(self, tokens: Ragged, attended: Tensor | None = None) -> Tensor:
        keys = None if attended is None else leading(tokens, attended)
        token = _rows.set((tokens, keys, self.attention))
        try:
            output = self.model(input_ids=tokens.values[None], position_ids=tokens.positions()[None])
        finally:
            _rows.reset(token)
        return self._hidden(output)[0]

    def _choose(self) -> tuple[bool, bool]:
        """Run the check at loading, in evaluation mode, and choose how rows run.

        Returns:
            Whether rows can be packed; and whether each has to run alone. Two False mean padding.

        Raises:
            ConfigError: The model cannot run, or its results differ from run to run.
        """
        what = f"loading a {self.family}: transformers does not run it on token ids alone, as irkit does"
        training = self.model.training
        self.model.eval()
        try:
            with (
                reraise_as(ConfigError, what, "take another one"),
                torch.no_grad(),
                _narrowed(self.model) as is_narrow,
            ):
                return self._compare(is_narrow)
        finally:
            self.model.train(training)

    def _compare(self, is_narrow: bool) -> tuple[bool, bool]:
        """Choose the first of packed, padded and alone that gives the results of rows that run alone.

        Args:
            is_narrow: Whether all attention windows were narrowed; without that, rows are not packed.

        Returns:
            As `_choose`.

        Raises:
            ConfigError: Results are not finite, or differ from run to run.
        """
        # rows of random tokens, and what each gives alone
        longest = self.max_positions or max(_CHECKED)
        lengths = torch.tensor([min(length, longest) for length in _CHECKED])
        lowest, highest = 5, min(len(self.word_embeddings), 1000)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            min(lowest, highest - 1), highest, (int(lengths.sum()),), generator=generator, device="cpu"
        )
        rows = Ragged(ids, lengths).to(self.word_embeddings.device)
        expected = self._run_alone(rows).float()
        if not bool(expected.isfinite().all()):
            raise ConfigError(f"loading a {self.family}: its hidden states are no finite numbers")

        def agree(run: Callable[[Ragged], Tensor]) -> bool:
            try:
                result = run(rows).float()
            except Exception:
                return False  # the model does something with rows that this way does not support
            tolerance = 1e-4 if torch.finfo(self.word_embeddings.dtype).bits >= 32 else 5e-2
            return bool(((result - expected).abs().max() <= tolerance * expected.abs().max()).item())

        # the fastest way that agrees
        if not _depends_on_length(self.settings):
            takes = "position_ids" in inspect.signature(self.model.forward).parameters
            if is_narrow and takes and getattr(self.model, "_supports_attention_backend", False):
                own = self.settings._attn_implementation
                _register()
                self.model.set_attn_implementation(_BACKEND)
                if agree(self._run_packed):
                    return True, False
                self.model.set_attn_implementation(own)
            if agree(self._run_padded):
                return False, False
        if not agree(self._run_alone):
            raise ConfigError(f"loading a {self.family}: a text gets other hidden states each time")
        return False, True


@contextmanager
def _narrowed(model: Any) -> Iterator[bool]:
    """Narrow attention windows inside the block, so that the short rows of the check reach beyond them.

    With rows longer than the original windows the check would take seconds.

    Yields:
        True; or False, with no window changed, if a window cannot be narrowed.
    """
    parts = [(part, getattr(part, "config", None)) for part in model.modules()]
    parts += [(config, config) for config in {id(config): config for _, config in parts}.values()]
    before = []
    for part, config in parts:
        window = getattr(part, "sliding_window", None)
        if isinstance(window, int) and window > _WINDOW:
            before.append((part, window, window - (getattr(config, "sliding_window", None) or 0)))
    is_narrow = all(more in (0, 1) for _, _, more in before)  # the window of its configuration, or the next
    try:
        for part, _, more in before if is_narrow else ():
            part.sliding_window = _WINDOW + more
        yield is_narrow
    finally:
        for part, window, _ in before:
            part.sliding_window = window


def longest_row(model: Any) -> int | None:
    """Return the number of tokens in the longest row that a model takes; None is any number."""
    longest = getattr(model.config, "max_position_embeddings", None) or 0
    for name, part in model.named_modules():  # as in RoBERTa, the first are of padding
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            longest = min(longest, len(part.weight) - part.padding_idx - 1)
    return longest if longest > 0 else None


def _depends_on_length(settings: Any) -> bool:
    """Return True if a long row in the batch changes the rotary angles of the others."""
    ropes = getattr(settings, "rope_parameters", None) or {}
    return any(
        isinstance(rope, dict) and rope.get("rope_type") in _BY_LENGTH for rope in (ropes, *ropes.values())
    )


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_BACKEND, _attention)
    AttentionMaskInterface.register(_BACKEND, lambda *_, **__: None)


def _attention(
    module: nn.Module,
    query: Tensor,  # (1, heads, total, head_dim), as are key and value
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if other.get(name) is not None]
    if attention_mask is not None or unknown or getattr(module, "is_causal", False):
        raise NotImplementedError(f"packed attention of {type(module).__name__} {unknown}")
    rows, keys, wish = _rows.get()
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    if k.shape[1] != q.shape[1]:  # grouped queries
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    if scaling is not None:
        q = q * (scaling * q.shape[-1] ** 0.5)
    backend = pick_backend(wish, q.device, q.dtype)
    queries = rows.with_values(q)
    if keys is not None:
        rows, k, v = keys, k[keys.values], v[keys.values]
    packed = (queries, rows.with_values(k), rows.with_values(v))
    window = None if sliding_window is None else sliding_window - 1  # theirs is the first that is too far
    out = attend(*packed, backend=backend, window=window, dropout=dropout)
    return out[None], None
