"""The options of `Model.encode`, and checks of their values."""

from __future__ import annotations

import difflib
from typing import TypedDict

from irkit.arguments import brief, check_flags, is_count
from irkit.errors import BadTypeError, BadValueError
from irkit.model.hardware import Device

_NOT_SPARSE = ("convert_to_numpy", "normalize_embeddings", "truncate_dim")
_ONLY_SPARSE = ("max_active_dims", "convert_to_sparse_tensor")


_FLAGS = (
    "show_progress_bar",
    "convert_to_numpy",
    "convert_to_tensor",
    "normalize_embeddings",
    "convert_to_sparse_tensor",
)


class EncodeOptions(TypedDict, total=False):
    """The options of `Model.encode`, with the names of sentence-transformers.

    Attributes:
        prompt_name: Name of the prompt of the model that is written before each text.
        prompt: Text written before each text; goes before ``prompt_name``.
        batch_size: Most texts encoded at once; by default only their tokens count (``tokens_per_step``).
        show_progress_bar: Show a bar on a terminal or in a notebook.
        convert_to_numpy: False, without ``convert_to_tensor``, returns a list of tensors.
        convert_to_tensor: Return a tensor on the device of the model instead of an array.
        normalize_embeddings: Scale vectors to length 1.
        truncate_dim: Keep this many leading dimensions.
        max_active_dims: Sparse models only: keep this many weights per text, whatever the model says.
        convert_to_sparse_tensor: Sparse models only: False returns dense tensors.
        device: Move the model there first; or several, each of which gets a process of its own.
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


def check_options(options: EncodeOptions, kind: str) -> None:
    """Check whether a model of a kind can encode with these options.

    Raises:
        BadTypeError: There is no such option, or a prompt is not a string.
        BadValueError: An option does nothing for this kind of model, or a batch would have no text.
    """
    known = EncodeOptions.__annotations__
    for name in options.keys() - known.keys():
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise BadTypeError(f"encode: no option is named {name!r}; {hint}")
    for name in _FLAGS:
        if options.get(name) is not None:
            check_flags("encode", **{name: options.get(name)})
    for name in _NOT_SPARSE if kind == "sparse" else _ONLY_SPARSE:
        if options.get(name) is not None and options.get(name) is not False:
            raise BadValueError(f"encode: {name} does nothing for a {kind} model; leave it out")
    size = options.get("batch_size")
    if size is not None and not is_count(size):
        raise BadValueError(f"encode: batch_size is {brief(size)}, expected a whole number of 1 or more")
    if not isinstance(options.get("prompt"), str | None):
        raise BadTypeError(f"encode: prompt is {brief(options.get('prompt'))}, expected a string")


def with_prompt(name: str, options: EncodeOptions) -> EncodeOptions:
    """Return the options with the prompt of that name, unless they name a prompt."""
    has_prompt = options.get("prompt") is not None or options.get("prompt_name") is not None
    return options if has_prompt else {**options, "prompt_name": name}
