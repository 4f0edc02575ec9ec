"""The directory of an index: who may write to it, and whether an index may be built there."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

from irkit.arguments import brief
from irkit.errors import BadTypeError, LockedError, StorageError
from irkit.index.array_files import DATA_FILE, SHARD, Manifest, peek
from irkit.utils.atomic import check_folder, explained
from irkit.utils.locks import FileLock
from irkit.utils.uris import is_uri

MANIFEST = "irkit.json"
BUILDING = "irkit.building.json"  # the manifest of a build that is not published
ASIDE = "irkit.json.tmp"  # a manifest that is being written
_LOCK = "irkit.lock"
COPY = "irkit.copy"  # in a copy of an index in an object store: its URI
RECIPE = "recipe.yaml"  # written by the command line


def lock_index(directory: Path) -> FileLock:
    """Take the lock of the directory of an index, which is the right to write to it.

    Raises:
        LockedError: Somebody else holds it.
        StorageError: The directory cannot be written to, or it is a copy of an index in an object store.
    """
    if (directory / COPY).exists():
        raise StorageError(
            f"index {(directory / COPY).read_text()}: it is searched from a copy on this machine, which "
            "cannot be changed; change a directory of your own and save it there"
        )
    with explained(f"locking {directory}", "the index can be read, not changed"):
        try:
            return FileLock(directory / _LOCK)
        except BlockingIOError:
            raise busy(directory) from None


def busy(directory: Path) -> LockedError:
    """Return the error of a change while another one is in progress."""
    return LockedError(
        f"index {directory}: somebody else is writing to it (in this process or another); "
        "try again when that has finished"
    )


def directory_of(path: str | Path) -> Path:
    """Return a path as the directory of an index.

    Raises:
        BadTypeError: ``path`` is neither a string nor a path.
        StorageError: No directory can have that name.
    """
    if not isinstance(path, str | Path):
        raise BadTypeError(f"index: got {brief(path, 100)} as its directory, expected a path")
    if is_uri(path):
        raise StorageError(
            f"index {path}: an index in an object store can be built, saved to and searched, and nothing "
            "else; change a directory of your own and save it there"
        )
    try:
        Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or a null character
        raise StorageError(f"index {str(path)!r}: {error}; choose another directory") from None
    return Path(path)


def check_target(directory: Path, overwrite: bool, operation: str = "building an index in") -> None:
    """Refuse a directory that holds an index, unless ``overwrite`` is set, or other files.

    Messages begin with ``operation``.

    Raises:
        StorageError: An index cannot be built there.
    """
    manifest, path = directory / MANIFEST, directory.resolve()
    for parent in path.parents:
        if _is_index(parent) and not (parent == path.parent and SHARD.fullmatch(path.name)):
            raise StorageError(
                f"{operation} {directory}: it is inside the index {parent}; choose another directory"
            )
    check_folder(directory, f"{operation} {directory}")
    if not path.exists():
        return
    with explained(f"reading {directory}"):
        present = {file.name for file in directory.iterdir()}
        whole = peek(manifest) is not None
        data = {name for name in present if DATA_FILE.fullmatch(name) or SHARD.fullmatch(name)}
        damaged = not whole and MANIFEST in present and (data or b'"checksum"' in manifest.read_bytes())
    ours = whole or damaged
    known = {BUILDING, _LOCK, ASIDE} | ({MANIFEST, RECIPE} if ours else set())
    other = sorted(present - known - data)
    if other and not whole:
        raise StorageError(
            f"{operation} {directory}: the directory holds other files "
            f"({', '.join(other[:3])}); choose a new or an empty one"
        )
    if ours and not overwrite:
        remedy = "" if operation.startswith("saving") else " or give overwrite=True"
        raise StorageError(f"{operation} {directory}: there is one already; choose another directory{remedy}")


def _is_index(folder: Path) -> bool:
    try:
        return any(peek(folder / name) for name in (MANIFEST, BUILDING))
    except OSError:  # this user may not read it
        return False


def manifests(directory: Path) -> list[Manifest]:
    """Return the manifests in a directory that are whole: of an index, and of a build."""
    return list(filter(None, (peek(directory / name) for name in (MANIFEST, BUILDING))))


def clean(directory: Path, building: bool, saved: bytes, manifest: Manifest) -> None:
    """Remove files that no manifest names, and bytes after the committed rows; needs the lock.

    Args:
        directory: Directory of the index.
        building: Whether the holder of the lock is a build.
        saved: Manifest that the holder has committed. What a compaction (see `irkit.index.compact`) of
            another manifest has left is removed.
        manifest: The same manifest, parsed.
    """
    other = peek(directory / (MANIFEST if building else BUILDING))
    build = None if building else other
    key = build.meta.get("build") if build else None
    if isinstance(key, dict) and key.get("compact", state := zlib.crc32(saved)) != state:
        (directory / BUILDING).unlink()
        other = None
    named = {entry.file for known in (manifest, other) if known for entry in known.arrays.values()}
    named |= {name for known in (manifest, other) if known for name in known.meta.get("shards", ())}
    sizes = {entry.file: entry.nbytes for entry in manifest.arrays.values()}
    with os.scandir(directory) as files:
        for file in files:
            if file.name == ASIDE or (DATA_FILE.fullmatch(file.name) and file.name not in named):
                (directory / file.name).unlink()
            elif SHARD.fullmatch(file.name) and file.name not in named:
                shutil.rmtree(file.path)
            elif file.name in sizes and file.stat().st_size > sizes[file.name]:
                os.truncate(file.path, sizes[file.name])


def absence(directory: Path) -> StorageError:
    """Return the error of opening a directory without an index, which says what is there."""
    if (directory / BUILDING).exists():
        reason = "its build has not finished; run the same build again to resume it"
    else:
        state = "no irkit.json in it" if directory.is_dir() else "no such directory"
        state = "it is a file" if directory.is_file() else state
        reason = f"{state}; expected a directory that an index was built in"
    return StorageError(f"opening index {directory}: {reason}")
