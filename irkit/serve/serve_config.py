"""Configuration of a server: what it serves, where it listens, and its limits."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from irkit.config import Config

Scope = Literal["read", "write"]


class ServeLimits(Config):
    """Limits of a server; a request beyond one of them gets an answer that names the limit.

    Attributes:
        body_bytes: Bytes of a request. Also characters of a query, times the texts that a cross-encoder reads
            with it.
        bodies_bytes: Bytes of all requests that arrive or are being answered; requests of up to 64 KiB do not
            count.
        texts: Texts, queries or documents of a request; also what a model ranks again for its queries.
        tokens: Tokens of all texts of a request.
        k: Hits of a query, skipped ones included.
        stream_k: Hits of a query in a stream.
        requests: Maximum number of requests that are answered at a time.
        waiting_tokens: Tokens that wait for a model; further requests are turned away.
        waiting_queries: Queries that wait for an index.
        waiting_writes: Changes that wait for an index.
        batch_tokens: Tokens that a model encodes together.
        batch_queries: Queries that an index searches together.
        compact_rows: Rows up to which an index is compacted as soon as a quarter of them is removed, while
            changes wait. A larger one is compacted when no change has come for ``compact_seconds``.
        compact_removed: Removed rows up to which no index is compacted.
        compact_seconds: Seconds without a change until a large index is compacted.
        seconds: Time until a request is given up.
        body_seconds: Time until the whole body of a request has arrived.
        idle_seconds: Seconds between two looks at a connection. It is closed if the headers of a request did
            not arrive in between, or if the client read nothing of an answer.
        shutdown_seconds: Seconds that running requests have to finish after SIGTERM.
    """

    body_bytes: PositiveInt = 32 << 20
    bodies_bytes: PositiveInt = 128 << 20
    texts: PositiveInt = 2048
    tokens: PositiveInt = 1 << 18
    k: PositiveInt = 1000
    stream_k: PositiveInt = 100_000
    requests: PositiveInt = 512
    waiting_tokens: PositiveInt = 1 << 18
    waiting_queries: PositiveInt = 4096
    waiting_writes: PositiveInt = 256
    batch_tokens: PositiveInt = 8192
    batch_queries: PositiveInt = 64
    compact_rows: PositiveInt = 50_000
    compact_removed: PositiveInt = 1024
    compact_seconds: PositiveFloat = 30
    seconds: PositiveFloat = 60
    body_seconds: PositiveFloat = 30
    idle_seconds: PositiveFloat = 15
    shutdown_seconds: PositiveFloat = 60


class ServeConfig(Config):
    """A server.

    Attributes:
        paths: Directories of indexes, and directories or hub names of models; each may be ``NAME=PATH``.
        host: Address to listen at.
        port: Port to listen at; 0 is any free one.
        workers: Processes.
        keys: Scope and SHA-256 (hexadecimal) of each API key.
        keys_file: File that SIGHUP reads the keys from again; None keeps them.
        device: Device of the models; None is a GPU if there is one, else the CPU.
        dtype: Precision of the models.
        engine: ``"ray"`` or the address of a cluster of Ray, whose actors search shards. None searches here.
        limits: See `ServeLimits`.
    """

    paths: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    workers: PositiveInt = 1
    keys: tuple[tuple[Scope, str], ...] = ()
    keys_file: str | None = None
    device: str | None = None
    dtype: str = "float32"
    engine: str | None = None
    limits: ServeLimits = ServeLimits()
