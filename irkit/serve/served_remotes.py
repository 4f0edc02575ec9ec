"""Serve documents in Qdrant or LanceDB: queries are encoded here, and searched there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from irkit.remote import LanceDB, Qdrant
from irkit.remote.remote_retriever import RemoteRetriever
from irkit.serve.problems import Problem
from irkit.serve.search_work import Job
from irkit.serve.serve_config import ServeLimits
from irkit.serve.served_indexes import PARTS, ServedIndex, Work

T = TypeVar("T")
ENGINES: dict[str, Any] = {"qdrant": Qdrant, "lancedb": LanceDB}
_COUNT_SECONDS = 10.0  # after which the documents are counted again


class RemoteAddress(NamedTuple):
    """Documents in an engine, as the command line names them: ``ENGINE:LOCATION#INDEX``.

    Attributes:
        engine: A key of `ENGINES`.
        location: Folder or address.
        source: Directory of the index that was exported, or of its model; empty for the one the export names.
    """

    engine: str
    location: str
    source: str


def parse_address(path: str) -> RemoteAddress | None:
    """Return the address of documents in an engine; None if ``path`` names no engine.

    Examples:
        >>> parse_address("qdrant:http://127.0.0.1:6333/notes#words-index")
        RemoteAddress(engine='qdrant', location='http://127.0.0.1:6333/notes', source='words-index')
        >>> parse_address("notes-index")
    """
    engine, colon, rest = path.partition(":")
    if not colon or engine not in ENGINES:
        return None
    location, _, source = rest.partition("#")
    return RemoteAddress(engine, location, source)


def open_remote(address: RemoteAddress, model: Any = None) -> RemoteRetriever:
    """Open the documents; ``model`` is used if the address names none."""
    remote: RemoteRetriever = ENGINES[address.engine](address.location, address.source or model)
    return remote


class ServedRemote(ServedIndex):
    """Documents in another engine by name; they are searched one batch at a time, and not changed."""

    def __init__(
        self,
        name: str,
        address: RemoteAddress,
        load: Callable[[RemoteAddress], RemoteRetriever],
        work: Work,
        limits: ServeLimits,
    ) -> None:
        self._address, self._turn, self._counted = address, threading.Lock(), (0.0, 0)
        opened: Callable[[str], Any] = lambda path: load(address)  # noqa: E731
        super().__init__(name, address.location, opened, work, limits)
        self._count()

    def retriever(self) -> Any:
        """Return the retriever."""
        return self._retriever

    def reload(self) -> None:
        """Open the documents again, unless Qdrant has locked their folder since it was opened."""
        if self._address.engine == "qdrant" and "://" not in self._address.location:
            return
        with self._turn:
            old = self.retriever()
            super().reload()
            old.close()

    def turn(self) -> AbstractContextManager[Any]:
        """Return the lock of the engine, which one thread may ask at a time."""
        return self._turn

    def count(self) -> int:
        """Return the number of documents, as it was some seconds ago."""
        return self._counted[1]

    def facts(self) -> dict[str, Any]:
        """Describe the documents, without the address; the values of no key can be counted."""
        about = self._retriever.about  # type: ignore[attr-defined]
        saved, kind = about["model"], about["kind"]
        return {
            "name": self.name,
            "documents": self.count(),
            "kind": self._address.engine,
            "representation": kind,
            "parts": ["bm25" if saved["name"] == "bm25" else PARTS[kind]],
            "model": Path(str(saved["name"] or "")).name,
            "similarity": saved.get("similarity"),
            "dim": about["dim"],
            "heads": [],
            "explain": [],
            "keys": [],
        }

    async def change(self, function: Callable[[Any], T], ends: float) -> T:
        """Refuse a change.

        Raises:
            Problem: Always.
        """
        raise Problem(422, f"index {self.name} is in {self._address.engine}; change its documents there")

    def _is_exact(self) -> bool:
        return False

    def _search(self, key: Hashable, jobs: Sequence[Job]) -> list[list[Any]]:
        with self._turn:
            self._count()
        return self.work(self.name, self._retriever, jobs)  # which takes the turns of all that it searches

    def _read(self, function: Callable[[Any], T]) -> T:
        with self._turn:
            return function(self._retriever)

    def _count(self) -> None:
        now = time.monotonic()
        if not self._counted[0] or now - self._counted[0] > _COUNT_SECONDS:
            self._counted = now, len(self._retriever)
