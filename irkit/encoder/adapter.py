"""Any other transformers model behind the surface of `Encoder`: packed where it allows that, else padded."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from irkit.encoder.attention import attend, leading, pick_backend
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.ragged import Ragged

__all__ = ["TransformersEncoder"]

_BACKEND = "irkit_packed"
# of the forward pass under way in this thread: rows, places of the keys if not all, attention backend
_rows: ContextVar[tuple[Ragged, Ragged | None, str]] = ContextVar("rows")


class TransformersEncoder(nn.Module):
    """An encoder that runs transformers' own code for an architecture irkit has no name map for.

    Where the model lets its attention be replaced, rows are packed without padding; a probe at loading
    compares both ways and falls back to padding unless they agree.

    Attributes:
        whole: The transformers model, with the decoder where it has one.
        model: Its encoder.
        packed: Whether rows are packed.
        family: ``model_type`` of its configuration.
        decoder: The last layer of a masked language model, whose input is then what the encoder gives.
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
        self.packed = False
        self.packed = self._can_pack()

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: torch.dtype = torch.float32, attention: str = "auto"
    ) -> TransformersEncoder:
        """Load a directory through ``transformers.AutoModel``; code inside the directory is never run.

        Raises:
            ConfigError: transformers does not know the architecture.
            CorruptError: Weights are missing.
        """
        return cls(_load("AutoModel", directory, dtype), attention=attention)

    def load_decoder_(self) -> nn.Linear:
        """Load the checkpoint as a masked language model, and give hidden states as its decoder gets them.

        Returns:
            The decoder; it is saved with the encoder.

        Raises:
            ConfigError: It is none, or does more with hidden states than to multiply them with one matrix.
        """
        dtype = next(self.parameters()).dtype
        self.whole = self.model = _load("AutoModelForMaskedLM", self.whole.name_or_path, dtype)
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
        self.decoder, self.packed = decoder, False
        self.packed = self._can_pack()
        return decoder

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model as transformers does."""
        self.whole.save_pretrained(str(directory))

    def grow_(self, vocab_size: int) -> None:
        """Make room for tokens that were added to the vocabulary, see `Encoder.grow_`."""
        old = int(self.settings.vocab_size)
        if vocab_size > old:
            weight = self.whole.resize_token_embeddings(vocab_size, mean_resizing=False).weight
            with torch.no_grad():
                weight[old:] = weight[:old].mean(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.packed:  # in another process: transformers does not know our attention there yet
            _register()

    @property
    def hidden_size(self) -> int:
        """Width of the output."""
        return int(self.settings.hidden_size) if self.decoder is None else self.decoder.in_features

    @property
    def word_embeddings(self) -> nn.Parameter:
        """``(vocab_size, width)``: a row for each token."""
        weight: nn.Parameter = self.whole.get_input_embeddings().weight
        return weight

    @property
    def max_positions(self) -> int | None:
        """Longest row that the configuration names; None is any length."""
        return getattr(self.settings, "max_position_embeddings", None)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged: ...  # noqa: D102

    def forward(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged:
        """Encode token ids ``(total,)`` to hidden states ``(total, hidden_size)``, as `Encoder` does.

        Raises:
            BadValueError: A row is longer than the position embeddings.
        """
        if self.max_positions is not None and tokens.max_length > self.max_positions:
            raise BadValueError(
                f"Encoder: a row of {tokens.max_length} tokens exceeds the {self.max_positions} positions "
                "of the model; truncate it in the tokenizer"
            )
        if not len(tokens.values):
            return tokens.with_values(torch.zeros(0, self.hidden_size, device=tokens.device))
        if self.packed:
            return tokens.with_values(self._run_packed(tokens, attended))
        ids, mask = tokens.to_padded(self.settings.pad_token_id or 0)
        seen = mask
        if attended is not None:
            seen = torch.arange(ids.shape[1], device=ids.device) < attended.to(ids.device)[:, None]
        hidden = self._hidden(self.model(input_ids=ids, attention_mask=seen.long()))
        return tokens.with_values(hidden[mask])

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

    def _can_pack(self) -> bool:
        takes = inspect.signature(self.model.forward).parameters
        if "position_ids" not in takes or not getattr(self.model, "_supports_attention_backend", False):
            return False
        own, training = self.settings._attn_implementation, self.model.training
        lengths = [3, 9, 1, 33]
        highest = min(self.settings.vocab_size, 1000)
        generator = torch.Generator().manual_seed(0)
        probe = Ragged(torch.randint(5, highest, (sum(lengths),), generator=generator), torch.tensor(lengths))
        probe = probe.to(next(self.model.parameters()).device)
        self.model.eval()
        agree = False
        with torch.no_grad():
            wanted = self.forward(probe).values.float()
            try:
                _register()
                self.model.set_attn_implementation(_BACKEND)
                got = self._run_packed(probe).float()
                tolerance = 1e-4 if wanted.dtype == next(self.model.parameters()).dtype else 5e-2
                agree = bool(((got - wanted).abs().max() <= tolerance * wanted.abs().max()).item())
            except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError):
                agree = False  # the model does something with attention that packing does not know
        if not agree:
            self.model.set_attn_implementation(own)
        self.model.train(training)
        return agree


def _load(kind: str, directory: str | Path, dtype: torch.dtype) -> Any:
    """A model of transformers in evaluation mode, all of whose weights are in the directory."""
    import transformers

    try:
        model, report = getattr(transformers, kind).from_pretrained(
            str(directory),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,  # or it asks on the terminal whether it may run what is there
            output_loading_info=True,
        )
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"loading {directory}: transformers cannot load it: {reason}") from error
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise CorruptError(f"loading {directory}: {len(missing)} weights are missing, such as {missing[0]}")
    return model.eval()


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
    out = attend(*packed, backend=backend, window=sliding_window, dropout=dropout)
    return out[None], None
