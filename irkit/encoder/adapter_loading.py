"""Load models of transformers strictly: every weight is read, none is left over, all are finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from irkit.config import read_json
from irkit.encoder.checkpoint_weights import BUFFERS, listed_names
from irkit.encoder.encoder_config import MOST_LAYERS
from irkit.errors import ConfigError, CorruptError
from irkit.utils.weights import check_finite

_ADVICE = "config.json and weights are not of one model; download or save it again"
_NO_CODE = "irkit runs no code beside a model; take one of an architecture that transformers has"


def load_transformers(kind: str, directory: str | Path, dtype: torch.dtype) -> Any:
    """Return a model of transformers in evaluation mode; code inside the directory is never run.

    Args:
        kind: Name of the class of transformers that picks the architecture, such as ``AutoModel``.
        directory: Directory of the model.
        dtype: Type of the weights in memory.

    Raises:
        ConfigError: transformers does not know the architecture, or cannot build what config.json says.
        CorruptError: Weights are missing, left over, of another shape, or no numbers.
    """
    import transformers

    settings = read_json(Path(directory) / "config.json")
    _check_layers(settings, directory)
    if {"AutoModel", kind} & {*(settings.get("auto_map") or ())}:
        raise ConfigError(
            f"loading {directory}: its config.json names code of its own (auto_map); {_NO_CODE}"
        )
    _check_size(kind, directory, _ADVICE)
    try:
        model, report = getattr(transformers, kind).from_pretrained(
            str(directory),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,  # or transformers asks on the terminal to run code of the model
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, by name
        )
    except Exception as error:  # whatever goes wrong inside transformers
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ConfigError(
            f"loading {directory}: transformers cannot load it: {reason}; {_NO_CODE}"
        ) from error
    _check_weights(model, report, directory, _ADVICE)
    return model.eval()


def _check_layers(settings: dict[str, Any], directory: str | Path) -> None:
    """Raise ConfigError if the ``settings`` of config.json have no layers or more than `MOST_LAYERS`."""
    for key, value in settings.items():
        if key in ("num_hidden_layers", "n_layers", "n_layer", "num_layers") and (
            not isinstance(value, int) or not 0 < value <= MOST_LAYERS
        ):
            raise ConfigError(
                f"loading {directory}: {key} is {value!r:.60} in config.json, expected 1 to {MOST_LAYERS}"
            )


def _check_size(kind: str, directory: str | Path, advice: str) -> None:
    """Raise CorruptError if config.json describes more weights than the weight files have bytes.

    The check runs before memory is taken. For the arguments see `load_transformers`; ``advice`` ends the
    message.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model = getattr(transformers, kind).from_config(config, trust_remote_code=False)
    except Exception:  # loading says what is wrong
        return
    count = sum(weight.numel() for weight in model.parameters())
    files = (file for end in ("safetensors", "bin") for file in Path(directory).glob(f"*.{end}"))
    size = sum(file.stat().st_size for file in files)
    if 0 < size < count:
        raise CorruptError(
            f"loading {directory}: config.json describes {count:,} weights, the files hold {size:,} bytes; "
            f"{advice}"
        )


def _check_weights(model: Any, report: Any, directory: str | Path, advice: str) -> None:
    misshapen = sorted(report["mismatched_keys"])
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    left = sorted(name for name in report["unexpected_keys"] if _is_of_encoder(name, model))
    problem = ""
    if misshapen:
        name, shape, expected = misshapen[0]
        problem = f"{len(misshapen)} weights have other shapes than config.json says, such as {name} with "
        problem += f"{tuple(shape)}, expected {tuple(expected)}"
    elif missing:
        problem = f"{len(missing)} weights are missing, such as {missing[0]}"
    elif left:
        problem = f"the {model.config.model_type} of transformers has no place for {listed_names(left)}, "
        problem += "without which it gives other vectors"
    if problem:
        raise CorruptError(f"loading {directory}: {problem}; {advice}")
    check_finite(model.named_parameters(), directory)


def _is_of_encoder(name: str, model: Any) -> bool:
    """Tell whether an unexpected weight belongs to the encoder; False for task heads, poolers and buffers.

    Args:
        name: Name of the weight in the checkpoint.
        model: Model that was loaded.
    """
    base = model.base_model
    for prefix in (f"{base.base_model_prefix}.", "model."):
        name = name.removeprefix(prefix)
    first = name.partition(".")[0]
    parts = {part for part, _ in (*base.named_children(), *base.named_parameters(recurse=False))}
    return first in parts and "pooler" not in first and not f".{name}".endswith(BUFFERS)
