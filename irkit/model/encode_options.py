"""The options of `irkit.Model.encode` and their check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, get_args, get_type_hints

from irkit.arguments import brief, check_flags, check_options, is_count
from irkit.errors import BadTypeError, BadValueError
from irkit.model.hardware import Device

_NOT_SPARSE = ("convert_to_numpy", "normalize_embeddings", "truncate_dim")
_ONLY_SPARSE = ("max_active_dims", "convert_to_sparse_tensor")


class EncodeOptions(TypedDict, total=False):
    """The options of `Model.encode`, with the names of sentence-transformers.

    Attributes:
        prompt_name: Name of the prompt of the model that is written before each text.
        prompt: Text written before each text; if given, ``prompt_name`` is ignored.
        batch_size: Largest number of texts encoded at once; None is any number, so that only
            ``tokens_per_step`` limits a step.
        show_progress_bar: Show a bar on a terminal or in a notebook.
        convert_to_numpy: True, the default, returns NumPy arrays. False, without ``convert_to_tensor``,
            returns a list of tensors.
        convert_to_tensor: Return a tensor on the device of the model instead of an array.
        normalize_embeddings: Scale vectors to length 1.
        truncate_dim: Number of leading dimensions to keep; None is the setting of the model.
        max_active_dims: Sparse models only: number of weights to keep per text, in place of the limits of the
            model.
        convert_to_sparse_tensor: Sparse models only: False returns dense tensors.
        device: Device to move the model to first; or several devices, which encode in a process each.
        heads: Models with several heads only: names of the heads that are asked for; None is all.
    """

    prompt_name: str | None
    prompt: str | None
    batch_size: int | None
    show_progress_bar: bool | None
    convert_to_numpy: bool
    convert_to_tensor: bool
    normalize_embeddings: bool
    truncate_dim: int | None
    max_active_dims: int | None
    convert_to_sparse_tensor: bool
    device: Device | None
    heads: Sequence[str] | None


_KINDS = get_type_hints(EncodeOptions)
_FLAGS = [name for name, kind in _KINDS.items() if bool in (kind, *get_args(kind))]


def check_encode_options(options: EncodeOptions, kinds: Mapping[str, str]) -> None:
    """Check the options of `EncodingModel.encode` for a model whose heads have these kinds.

    Raises:
        BadTypeError: An option does not exist, or a prompt is not a string.
        BadValueError: An option does nothing for any of these kinds, or ``batch_size`` is below 1.
    """
    check_options("encode", options, _KINDS)
    check_flags("encode", **{name: options.get(name) for name in _FLAGS if options.get(name) is not None})
    are_sparse = {kind == "sparse" for kind in kinds.values()}
    useless = (*_NOT_SPARSE * (False not in are_sparse), *_ONLY_SPARSE * (True not in are_sparse))
    for name in useless:
        if options.get(name) is not None and options.get(name) is not False:
            kind = " and ".join(dict.fromkeys(kinds.values()))
            raise BadValueError(f"encode: {name} does nothing for a {kind} model; leave it out")
    size = options.get("batch_size")
    if size is not None and not is_count(size):
        raise BadValueError(f"encode: batch_size is {brief(size)}, expected a whole number of 1 or more")
    if not isinstance(options.get("prompt"), str | None):
        raise BadTypeError(f"encode: prompt is {brief(options.get('prompt'))}, expected a string")
