"""Search and change one index for many clients."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from irkit.encoder_free import EncoderFreeModel
from irkit.errors import IrkitError, LockedError, StorageError
from irkit.index import InvertedConfig
from irkit.index.array_files import peek
from irkit.index.directory import MANIFEST
from irkit.model import Model
from irkit.ray_engine.ray_search import ShardedRetriever
from irkit.retrieval.retriever import Retriever
from irkit.serve.batcher import Batcher
from irkit.serve.problems import Problem
from irkit.serve.search_work import OWN, Job
from irkit.serve.serve_config import ServeLimits
from irkit.shards import rewrite

T = TypeVar("T")
Work = Callable[[str, Retriever, Sequence[Job]], list[list[Any]]]
"""Find what each query of each job asks for: name of the index, index, jobs."""

_SHALLOW = 32  # hits up to which all searches cost about the same
_PAUSE = 0.02  # seconds between attempts to write while another process writes
_MARGIN = 0.05  # of the time of a request: what is left to answer when a change is given up
PARTS = {"dense": "dense", "multi_vector": "tokens", "sparse": "sparse"}
EXPLAINED = {"tokens": "tokens", "sparse": "terms", "bm25": "terms"}


class _Change:
    """A change in the queue; it is not begun once its request is given up.

    Attributes:
        function: Changes the index.
        lock_ends: Time until which it waits for the lock.
        has_begun: Whether the function runs, or has run.
        is_given_up: Whether the request has ended.
    """

    def __init__(self, function: Callable[[Retriever], Any], lock_ends: float) -> None:
        self.function, self.lock_ends = function, lock_ends
        self.has_begun = self.is_given_up = False


class ServedIndex:
    """An index by name: searched in one thread, changed in another one, each with a queue.

    Attributes:
        name: Name in routes.
        path: Directory, or URI of an index in an object store.
        is_shared: Whether other processes of this server change it, too.
        limits: Limits of the server.
        work: Finds what the jobs of a batch ask for.
        searches: Queue of searches.
        writes: Queue of changes.
    """

    def __init__(
        self,
        name: str,
        path: str,
        load: Callable[[str], Retriever],
        work: Work,
        limits: ServeLimits,
        is_shared: bool = False,
    ) -> None:
        self.name, self.path, self.limits, self.is_shared = name, path, limits, is_shared
        self._load, self.work = load, work
        self._seen = self._stamp()  # before the manifest is read, so that no commit is missed
        self._retriever, self._renewing = load(path), threading.RLock()
        self._tidying: asyncio.Task[None] | None = None
        self._changed, self._is_closing = 0.0, False
        self._unopened = ""  # why the index that is in the directory now is not the one in use
        self._replaced: list[ShardedRetriever] = []  # whose actors end before the next search
        self.searches = Batcher(f"index {name}", self._search, limits.batch_queries, limits.waiting_queries)
        self.writes = Batcher(f"changes of {name}", self._change, 1, limits.waiting_writes)

    def retriever(self) -> Retriever:
        """Return the retriever of the newest state of the directory, also if the index was replaced.

        If the new index does not fit its model, the old one stays in use until there is another one.

        Raises:
            StorageError: The directory cannot be opened.
        """
        if self._stamp() != self._seen:
            with self._renewing:  # in one thread, which the others wait for
                if (stamp := self._stamp()) != self._seen:
                    try:
                        self._renew()
                    except StorageError:  # perhaps for a moment only
                        raise
                    except IrkitError as error:
                        self._unopened = f"index {self.name}: it was replaced, and the new one fails: {error}"
                        logging.getLogger("irkit.serve").error(
                            json.dumps({"event": "not renewed", "name": self.name, "error": str(error)})
                        )
                    self._seen = stamp
        return self._retriever

    def _renew(self) -> None:
        """Move on to the newest state; open the directory again if it has another index now."""
        with suppress(OSError):  # a StorageError is one
            manifest = peek(Path(self.path) / MANIFEST)
            # the old retriever, which may stay in use, must not move to the files of another index
            if manifest is not None and manifest.meta.get("build") == self._retriever.store.meta["build"]:
                self._retriever.refresh()
                self._retriever.collection.check_current()
                return
        self.reload()

    def reload(self) -> None:
        """Open the directory again; running searches finish on the index that they began with.

        Raises:
            StorageError: The directory cannot be opened; the old index stays in use.
            BadValueError: The index does not fit its model; the old index stays in use.
        """
        with self._renewing:
            stamp, old = self._stamp(), self._retriever
            self._retriever, self._seen, self._unopened = self._load(self.path), stamp, ""
            if isinstance(old, ShardedRetriever):
                self._replaced.append(old)

    def turn(self) -> AbstractContextManager[Any]:
        """Return a context in which to search from a thread of another index."""
        return nullcontext()

    def count(self) -> int:
        """Return the number of documents that the last search saw; reads no manifest, and so never waits."""
        return len(self._retriever)

    def _stamp(self) -> tuple[int, ...]:
        """Return what changes when another process commits."""
        try:
            status = os.stat(f"{self.path}/{MANIFEST}")  # noqa: PTH116 (one call, before each search)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def facts(self) -> dict[str, Any]:
        """Describe the index for clients: no path of this machine is included."""
        retriever = self.retriever()
        with retriever.store.snapshot():
            saved = retriever.store.meta["model"]
            lexical = saved["name"] == "bm25"
            model = retriever.model
            heads = model.heads if isinstance(model, Model) else {}
            kinds = [head.kind for head in heads.values()] or [saved["kind"]]
            parts = ["bm25"] if lexical else [PARTS[kind] for kind in kinds]
            explained = [EXPLAINED[part] for part in parts if part in EXPLAINED]
            computed = isinstance(model, EncoderFreeModel) and not lexical
            return {
                "name": self.name,
                "documents": len(retriever),
                "kind": retriever.index.config.kind,
                "representation": saved["kind"],
                "parts": parts,
                "heads": [*heads] if len(heads) > 1 else [],
                "model": Path(str(saved["name"] or "")).name,
                "similarity": saved["similarity"],
                "dim": saved["dim"],
                "explain": [*dict.fromkeys(explained), *([] if computed else ["passages"])],
                "keys": retriever.documents.metadata_keys(),
            }

    async def search(self, queries: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        """Search for each query and return the results; compatible requests are searched in one batch."""
        size = self.limits.batch_queries
        jobs = [Job(list(queries[start : start + size]), options) for start in range(0, len(queries), size)]
        key = self._key(options)
        batches = await self.searches.submit(key, [(job, len(job.queries)) for job in jobs])
        return [result for results in batches for result in results]

    def _key(self, options: dict[str, Any]) -> str:
        """Return a key; requests with equal keys are searched in one batch.

        Their ``k`` may differ where the hits of a search are the first ones of a deeper search, as long as
        the deepest one does not make the others much slower.
        """
        shared = {name: value for name, value in options.items() if name not in OWN}
        k = options["k"]
        if not (options["fuse"] or options["rerank"]) and self._is_exact():
            k = max(_SHALLOW, 1 << (k - 1).bit_length())
        return json.dumps([k, shared], sort_keys=True)

    def _is_exact(self) -> bool:
        index = self._retriever.index
        if isinstance(index.config, InvertedConfig):
            most = index.store.limits.inverted_exact
            return index.config.mode == "exact" or (index.config.mode == "auto" and len(index) <= most)
        return index.config.kind == "flat"

    def _search(self, key: Hashable, jobs: list[Job]) -> list[list[Any]]:
        retriever = self.retriever()
        for old in self._replaced:  # no search is running
            old.actors.close()
        self._replaced.clear()
        with retriever.store.snapshot():
            return self.work(self.name, retriever, jobs)

    async def read(self, function: Callable[[Any], T]) -> T:
        """Call a function with the retriever in a thread, where it sees one state of the index."""
        return await asyncio.to_thread(self._read, function)

    def _read(self, function: Callable[[Any], T]) -> T:
        retriever = self.retriever()
        with retriever.store.snapshot():
            return function(retriever)

    async def change(self, function: Callable[[Retriever], T], ends: float) -> T:
        """Call a function that changes the index, after all earlier changes; return after the commit.

        Args:
            function: Changes the index.
            ends: Time of `time.monotonic` at which the request is given up.

        Raises:
            LockedError: Another process has been writing all the time.
            Problem: The time is over (408).
        """
        margin = _MARGIN * self.limits.seconds
        change = _Change(function, ends - 2 * margin)  # first of all, so that the client learns of the lock
        try:
            async with asyncio.timeout(ends - margin - time.monotonic()):
                try:
                    [result] = await self.writes.submit("change", [(change, 1)])
                finally:
                    change.is_given_up = True
        except TimeoutError:
            if change.has_begun:
                text = "it has begun and may still be stored; look whether it is before you repeat it"
                raise Problem(408, f"the change took too long: {text}") from None
            text = "the change waited too long for others before it; nothing was changed, so try again"
            raise Problem(408, text) from None
        self._changed = time.monotonic()
        if self._tidying is None and self._is_wasteful():
            self._tidying = asyncio.create_task(self._tidy())
        return result  # type: ignore[no-any-return]

    def _is_wasteful(self) -> bool:
        """Return whether so many rows are removed documents that a compaction pays.

        The answer is False for a large index that other processes change as well, because their changes would
        wait for the compaction.
        """
        rows = len(self._retriever.index)
        if self.is_shared and self._is_large():
            return False
        return rows - len(self._retriever) > max(self.limits.compact_removed, rows // 4)

    @property
    def is_compacting(self) -> bool:
        """Whether a compaction runs or is scheduled."""
        return self._tidying is not None

    def _is_large(self) -> bool:
        return len(self._retriever.index) > self.limits.compact_rows

    async def _tidy(self) -> None:
        """Compact the index after all waiting changes; a large index, once no change has come for a while.

        Searches continue. A change that arrives during the compaction of a large index cancels the compaction
        and schedules another one.
        """
        try:
            while (
                self._is_large()
                and (left := self._changed + self.limits.compact_seconds - time.monotonic()) > 0
            ):
                await asyncio.sleep(left)
            change = _Change(self._compact, time.monotonic() + self.limits.seconds)
            await self.writes.submit("change", [(change, 1)])
        except IrkitError as error:  # another process writes, or the disk is full: a later change tries again
            logging.getLogger("irkit.serve").warning(
                json.dumps({"event": "no compaction", "name": self.name, "error": str(error)})
            )
        finally:
            self._tidying = None

    def _compact(self, _: Retriever) -> None:
        is_large = self._is_large()

        def go_on(*progress: Any) -> None:
            if self._is_closing or (is_large and self.writes.waiting):
                raise Problem(503, "it is given up for now, because a change waits or the server ends")

        rewrite(self.path, progress=go_on)
        self.retriever()
        gc.collect()  # old states refer to themselves, and keep files in memory that are removed

    def _change(self, key: Hashable, changes: list[_Change]) -> list[Any]:
        """Change the index; wait while another process holds its lock."""
        [change] = changes
        while True:
            retriever = self.retriever()
            if self._unopened:
                raise StorageError(self._unopened)
            change.has_begun = True  # before the look, so that who gives it up at this moment knows
            if change.is_given_up:
                return [None]
            try:
                return [change.function(retriever)]
            except LockedError:
                change.has_begun = False
                if time.monotonic() > change.lock_ends:
                    raise
                time.sleep(_PAUSE)

    async def close(self) -> None:
        """Finish running searches and changes, cancel a compaction, and close the files."""
        self._is_closing = True
        if self._tidying is not None:
            self._tidying.cancel()
        await self.searches.close()
        await self.writes.close()
        self._retriever.close()
