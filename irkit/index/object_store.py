"""Directories of indexes in object stores: uploaded whole, and searched from a checked copy on this machine.

An index is written to memory-mapped files, which object stores do not have. So it is built in a directory on
this machine and uploaded when it is finished, and a reader downloads it once. Below its URI there are::

    irkit.uploaded.json       the marker: name of the folder, size and CRC-32 of every file in it
    v-1f0c.../irkit.json ...  the files of the index, in a folder whose name is a hash of their checksums

The marker is written last, in one request, and only what it names exists: an upload that was cut leaves the
index that was there, and is continued by the next one. Folders that it does not name are removed afterwards.
A download compares the checksum of each file as it comes, and its directory appears when all are right. A
file that was cut is downloaded again; files that are whole are kept. Copies are in the cache (see
`irkit.utils.cache`); they are not changed, because nothing would bring the changes back.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from irkit_kernels._machine_code import cache_folder

from irkit.errors import CorruptError, StorageError, reraise_as
from irkit.index.array_files import DATA_FILE, SHARD
from irkit.index.directory import COPY, MANIFEST, RECIPE, lock_index
from irkit.index.limits import current_limits
from irkit.index.store import Store
from irkit.utils.atomic import explained, make_folder
from irkit.utils.uris import open_store_of, open_uri

MARKER = "irkit.uploaded.json"
_BLOCK = 1 << 23  # bytes
_BUCKETS = {"s3", "gs", "abfs"}  # stores without folders, whose buckets a wrong name must not make
_FOLDER = re.compile(r"v-[0-9a-f]{16}")
_ADVICE = "check the address, the connection and the right to write"


class Uploaded(NamedTuple):
    """What a marker says.

    Attributes:
        folder: Name of the folder of the files.
        files: Size in bytes and CRC-32 of each file by its path in the folder.
    """

    folder: str
    files: dict[str, tuple[int, int]]


def upload_index(directory: Path, uri: str, overwrite: bool = False) -> Uploaded:
    """Upload the index in a directory; the index at the URI is replaced in one step.

    Args:
        directory: A finished index.
        uri: Folder of an object store.
        overwrite: Replace an index that is there.

    Raises:
        StorageError: An index is at the URI, or the store fails. The index at the URI stays.
        CorruptError: A file of the index is truncated or altered.
        LockedError: Somebody is writing to the directory.
    """
    check_uri(uri, overwrite)
    before = read_marker(uri)
    with lock_index(directory):
        files = _files_of(directory)
        content = json.dumps(files, sort_keys=True).encode()
        uploaded = Uploaded("v-" + hashlib.blake2b(content, digest_size=8).hexdigest(), files)
        store, root = open_store_of(uri.rstrip("/"))
        for name, (size, _) in files.items():
            put = partial(_put, store, directory / name, f"{root}/{uploaded.folder}/{name}", size)
            _with_retries(f"uploading {uri}", put)
        about: dict[str, Any] = {"folder": uploaded.folder, "files": files}
        about["checksum"] = _checksum(about)
        marker = json.dumps(about, indent=1).encode()
        _with_retries(f"uploading {uri}", lambda: store.pipe_file(f"{root}/{MARKER}", marker))
    if before is not None and before.folder != uploaded.folder:
        with contextlib.suppress(Exception):  # nothing reads the old files
            store.rm(f"{root}/{before.folder}", recursive=True)
    return uploaded


def check_uri(uri: str, overwrite: bool) -> None:
    """Refuse a URI where an index is, unless ``overwrite`` is set.

    Raises:
        StorageError: An index is at the URI, or the store fails.
    """
    if not overwrite and read_marker(uri) is not None:
        raise StorageError(
            f"writing an index to {uri}: there is one already; choose another place or give overwrite=True"
        )


def read_marker(uri: str) -> Uploaded | None:
    """Return what the marker at a URI says; None without a marker.

    Raises:
        CorruptError: The marker is damaged.
        StorageError: The store fails.
    """
    store, root = open_store_of(uri.rstrip("/"))

    def read() -> Any:
        try:
            return store.cat_file(f"{root}/{MARKER}")
        except (FileNotFoundError, NotADirectoryError):
            return None

    problem: Exception | None = None
    limits = current_limits()
    for attempt in range(limits.upload_tries):  # a store without atomic writes may be writing it
        data = _with_retries(f"opening {uri}", read)
        if data is None:
            return None
        try:
            about = json.loads(data)
            checksum = about.pop("checksum")
            files = {name: (int(size), int(crc)) for name, (size, crc) in about["files"].items()}
            if checksum != _checksum(about) or not _FOLDER.fullmatch(about["folder"]):
                raise ValueError("its checksum is wrong")
            if not all(map(_is_name, files)):
                raise ValueError("it names a file that no index has")
            return Uploaded(about["folder"], files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = error
            time.sleep(limits.upload_pause * attempt)
    raise CorruptError(f"opening {uri}: {MARKER} is damaged ({problem}); upload the index again")


def download_index(uri: str) -> Path:
    """Return the directory of a checked copy of an index in an object store, downloaded now or earlier.

    Raises:
        StorageError: No index is at the URI, the store fails, or the copy cannot be written.
        CorruptError: A file was altered in the store.
    """
    problem: Exception | None = None
    tries = current_limits().upload_tries
    for _ in range(tries):
        uploaded = read_marker(uri)
        if uploaded is None:
            raise StorageError(
                f"opening {uri}: no index is there (no {MARKER}); irkit index --out {uri} writes one"
            )
        cache = copies_of(uri)
        if (cache / uploaded.folder).is_dir():
            return cache / uploaded.folder
        try:
            return _download(uri, uploaded, cache)
        except StorageError as error:
            problem = error
            if read_marker(uri) == uploaded:  # it was not replaced meanwhile
                raise
    raise StorageError(
        f"opening {uri}: the index was replaced during each of {tries} downloads; try again"
    ) from problem


def copies_of(uri: str) -> Path:
    """Return the folder of the cache that has the copies of an index."""
    return cache_folder() / "indexes" / hashlib.blake2b(uri.rstrip("/").encode(), digest_size=12).hexdigest()


@contextlib.contextmanager
def staged(uri: str, overwrite: bool) -> Iterator[Path]:
    """Yield a directory of this machine to build an index in; at the end of the block the index is uploaded.

    The directory is the same for every build of the URI, so that a killed build is resumed.

    Raises:
        StorageError: An index is at the URI, or the store fails.
    """
    check_uri(uri, overwrite)
    cache = copies_of(uri)
    with explained(f"building {uri} in {cache}", "set IRKIT_CACHE to a folder that can be written"):
        make_folder(cache)
    folder = cache / "build"
    (folder / COPY).unlink(missing_ok=True)  # of a build that was killed after its upload
    yield folder
    try:
        uploaded = upload_index(folder, uri, overwrite)
    except StorageError as error:
        raise StorageError(
            f"{error}; the index is complete in {folder}: Retriever.load of it, and save({uri!r}), uploads it"
        ) from error
    with _locked(cache):
        if not (cache / uploaded.folder).exists():
            (folder / COPY).write_text(uri)
            folder.rename(cache / uploaded.folder)
        _remove_others(cache, uploaded.folder)


def _download(uri: str, uploaded: Uploaded, cache: Path) -> Path:
    """Download the files of an index, those that are not there yet, and give their directory its name."""
    store, root = open_store_of(uri.rstrip("/"))
    part, folder = cache / f"{uploaded.folder}.part", cache / uploaded.folder
    with explained(f"copying {uri} to {cache}", "set IRKIT_CACHE to a folder that can be written"):
        make_folder(cache)
        with _locked(cache):
            if folder.is_dir():
                return folder
            for name, (size, crc) in uploaded.files.items():
                target = part / name
                make_folder(target.parent)
                if not _is_whole(target, size, crc):
                    source = store.unstrip_protocol(f"{root}/{uploaded.folder}/{name}")
                    _with_retries(f"opening {uri}", partial(_get, source, target, size, crc))
            (part / COPY).write_text(uri)
            part.rename(folder)
            _remove_others(cache, uploaded.folder)
    return folder


def _put(store: Any, file: Path, path: str, size: int) -> None:
    """Upload a file, unless an earlier call has; the name of its folder says its content."""
    with contextlib.suppress(FileNotFoundError):
        if store.info(path)["size"] == size:
            return
    protocols = {store.protocol} if isinstance(store.protocol, str) else set(store.protocol)
    if not protocols & _BUCKETS:
        store.makedirs(path.rpartition("/")[0], exist_ok=True)
    with file.open("rb") as source, store.open(path, "wb") as stream:
        left = size
        while left and (block := source.read(min(left, _BLOCK))):
            stream.write(block)
            left -= len(block)
    if store.info(path)["size"] != size:
        raise OSError(f"{path} has {store.info(path)['size']} of {size} bytes")


def _get(source: str, target: Path, size: int, crc: int) -> None:
    actual, count = 0, 0
    with open_uri(source) as stream, target.open("wb") as copy:
        while block := stream.read(_BLOCK):
            actual, count = zlib.crc32(block, actual), count + len(block)
            copy.write(block)
    if (count, actual) != (size, crc):
        raise CorruptError(
            f"{source}: {count:,} bytes with checksum {actual:08x}, expected {size:,} with {crc:08x}; upload "
            "the index again"
        )


def _files_of(directory: Path, prefix: str = "") -> dict[str, tuple[int, int]]:
    """Return size and CRC-32 of each file of an index, and of its shards."""
    store = Store.open(directory, verify=True)
    entries = store.committed.arrays.values()
    files = {prefix + entry.file: (entry.nbytes, entry.crc32) for entry in entries}
    saved = store.committed.saved
    files[prefix + MANIFEST] = len(saved), zlib.crc32(saved)
    if (recipe := directory / RECIPE).is_file():
        content = recipe.read_bytes()
        files[prefix + RECIPE] = len(content), zlib.crc32(content)
    for name in store.meta.get("shards", ()):
        files |= _files_of(directory / name, f"{name}/")
    store.close()
    return files


def _is_name(name: str) -> bool:
    *folders, file = name.split("/")
    known = file in (MANIFEST, RECIPE) or DATA_FILE.fullmatch(file)
    return bool(known) and len(folders) < 2 and all(SHARD.fullmatch(folder) for folder in folders)


def _is_whole(file: Path, size: int, crc: int) -> bool:
    actual = 0
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                actual = zlib.crc32(block, actual)
            return (stream.tell(), actual) == (size, crc)
    except OSError:
        return False


def _with_retries(operation: str, work: Callable[[], Any]) -> Any:
    """Return ``work()``; after an error of the store, wait and try again.

    Raises:
        StorageError: The last attempt failed.
    """
    limits = current_limits()
    for attempt in range(limits.upload_tries):
        try:
            with reraise_as(StorageError, operation, _ADVICE):
                return work()
        except StorageError:
            if attempt + 1 == limits.upload_tries:
                raise
            time.sleep(limits.upload_pause * 2**attempt)
    raise AssertionError("unreachable")


def _checksum(about: dict[str, Any]) -> int:
    plain = {"folder": about["folder"], "files": {name: list(two) for name, two in about["files"].items()}}
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Wait for the lock of the copies of an index."""
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_others(cache: Path, folder: str) -> None:
    """Remove older copies; processes that have mapped their files can still read them."""
    for other in cache.iterdir():
        if other.is_dir() and other.name not in (folder, "build"):
            shutil.rmtree(other, ignore_errors=True)
