"""The arguments for transformers that a sentence_bert_config.json may give.

Source: Transformer of sentence-transformers 6.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irkit.errors import ConfigError

_GROUPS = (  # each with its older name
    *("config_kwargs", "config_args"),
    *("model_kwargs", "model_args"),
    *("processor_kwargs", "tokenizer_args"),
)
_HARMLESS = {  # arguments that do not change vectors, beyond rounding
    *("trust_remote_code", "attn_implementation", "torch_dtype", "dtype", "add_pooling_layer", "use_cache"),
    *("padding", "padding_side", "use_fast", "device_map", "low_cpu_mem_usage", "use_safetensors"),
    *("revision", "code_revision", "token", "cache_dir", "local_files_only", "return_tensors"),
    "reference_compile",
    "model_max_length",  # read by irkit.tokenizer
}


def check_arguments(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that a Transformer module gives transformers no argument that changes its vectors.

    Args:
        folder: Folder of the module, for messages.
        settings: Content of its sentence_bert_config.json.

    Raises:
        ConfigError: There is such an argument; irkit would compute other vectors without it.
    """
    calls = settings.get("processing_kwargs") or {}
    groups = {name: settings.get(name) or {} for name in _GROUPS}
    calls = calls if isinstance(calls, Mapping) else {"text": calls}
    groups |= {f"processing_kwargs.{name}": calls.get(name) or {} for name in ("common", "text")}
    for name, arguments in groups.items():
        if not isinstance(arguments, Mapping):
            raise ConfigError(f"loading {folder}: {name} of sentence_bert_config.json is no dictionary")
        for key, value in arguments.items():
            usual = value in (None, "", [], {}) or (key == "truncation" and value in (True, "longest_first"))
            if key not in _HARMLESS and not usual:
                raise ConfigError(
                    f"loading {folder}: {name} of sentence_bert_config.json has {key} {value!r:.40}, which "
                    "irkit does not pass to transformers; remove it, or move it to config.json, "
                    "tokenizer_config.json or, for a length, to max_seq_length"
                )
