"""API keys: who may read and who may write.

Keys come from a file or from the environment variable ``IRKIT_SERVE_KEYS``: for each a line ``read KEY`` or
``write KEY``. A write key may read too. Without any read key everybody may read; without a write key nobody
may write. Only hashes are kept, and all are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from irkit.errors import BadValueError
from irkit.serve.problems import Problem
from irkit.serve.serve_config import Scope, ServeConfig
from irkit.utils.atomic import explained

VARIABLE = "IRKIT_SERVE_KEYS"
_SHORTEST = 8


def read_keys(path: str | Path | None) -> tuple[tuple[Scope, str], ...]:
    """Read keys from a file, or else from the environment; return scope and hash of each.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: A line is malformed, or a key is shorter than 8 characters; the message has no key.
    """
    text, source = os.environ.get(VARIABLE, ""), f"${VARIABLE}"
    if path is not None:
        source = str(path)
        with explained(f"reading the keys of {path}"):
            try:
                text = Path(path).read_text("utf-8")
            except UnicodeDecodeError as error:
                raise BadValueError(f"reading the keys of {path}: expected UTF-8, got {error}") from error
    keys: list[tuple[Scope, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] not in ("read", "write") or len(words[1]) < _SHORTEST:
            raise BadValueError(
                f"{source}, line {number}: expected `read KEY` or `write KEY`, with {_SHORTEST} or more "
                "characters and no space in the key"
            )
        keys.append((words[0], _hash(words[1].encode())))  # type: ignore[arg-type]
    return tuple(keys)


def with_new_keys(config: ServeConfig) -> ServeConfig:
    """Return a configuration with the keys that its file has now; keys of the environment never change.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: A line is malformed.
    """
    if config.keys_file is None:
        return config
    return config.model_copy(update={"keys": read_keys(config.keys_file)})


def check_access(keys: Sequence[tuple[Scope, str]], scope: Scope, authorization: bytes) -> None:
    """Raise a Problem unless the header ``Authorization`` has a key for ``scope``.

    Raises:
        Problem: 401 without a key that is known, 403 if the key may only read, or no key may write.
    """
    scopes = {known for known, _ in keys}
    if scope == "write" and "write" not in scopes:
        raise Problem(403, f"changes need a write key, and the server was started without; see ${VARIABLE}")
    if scope == "read" and "read" not in scopes:
        return
    kind, _, key = authorization.strip().partition(b" ")
    digest = _hash(key.strip())
    matches = [hmac.compare_digest(digest, known) for _, known in keys]  # of all, whichever it is
    if kind.lower() != b"bearer" or not any(matches):
        raise Problem(401, "no valid key; expected the header Authorization: Bearer KEY")
    own = {known for (known, _), same in zip(keys, matches, strict=True) if same}
    if scope == "write" and "write" not in own:
        raise Problem(403, "this key may read only; changes need a write key")


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
