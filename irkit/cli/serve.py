"""``irkit serve``: serve indexes and models over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from irkit.cli.options import Count, Settings


def serve(
    paths: Annotated[list[str] | None, typer.Argument(metavar="DIR_OR_MODEL...", show_default=False)] = None,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8080,
    workers: Count = 1,
    keys: Path | None = None,
    override: Settings = None,
    device: str | None = None,
    dtype: str = "float32",
    engine: str | None = None,
) -> None:
    """Serve indexes and models over HTTP, with a page to search at /.

    The routes follow text-embeddings-inference, OpenAI, Cohere and irkit itself, see docs/serve.md. SIGTERM
    and Ctrl-C end the server after the running requests. SIGHUP reads the keys and the indexes again. The log
    goes to standard error.

    Args:
        paths: Directories of indexes, and directories or hub names of models. NAME=PATH gives a name. Exports
            are qdrant:ADDRESS and lancedb:ADDRESS, with #DIR for the index of their terms.
        host: Address to listen on; 0.0.0.0 accepts connections from other machines.
        port: Port to listen on; 0 chooses a free one.
        workers: Number of processes.
        keys: File of API keys, with lines `read KEY` and `write KEY`; default: $IRKIT_SERVE_KEYS. Without a
            write key the documents cannot be changed.
        override: Set a limit, such as seconds=10 or body_bytes=1000000. May be repeated.
        dtype: Precision of the models: auto, float32, bfloat16 or int8.
        engine: Let actors of Ray search the shards of the indexes: ray on this machine, or ray://HOST:PORT.

    Examples:
        irkit serve notes-index
        irkit serve words=bm25-index tokens=plaid-index reranker=cross-encoder-model --port 9000
    """
    from irkit.config import with_overrides
    from irkit.errors import require

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, "serve", "irkit serve")
    from irkit.serve.access import read_keys
    from irkit.serve.serve_config import ServeConfig, ServeLimits
    from irkit.serve.server import serve as run

    config = ServeConfig(
        paths=tuple(paths or ()),
        host=host,
        port=port,
        workers=workers,
        keys=read_keys(keys),
        keys_file=None if keys is None else str(keys.absolute()),
        device=device,
        dtype=dtype,
        engine=engine,
        limits=ServeLimits.parse(with_overrides({}, override or ()), "--set"),
    )
    run(config)
