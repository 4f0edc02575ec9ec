"""The application: all routes, behind the guard, with the page at ``/``."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from irkit.errors import IrkitError
from irkit.serve import document_routes, openai_routes, search_routes, tei_routes
from irkit.serve.answers import Error, Readiness, Status
from irkit.serve.catalogue import Catalogue
from irkit.serve.guard import LOG, Guard
from irkit.serve.meters import exposition
from irkit.serve.problems import Problem, handle, respond
from irkit.serve.tei_routes import INTERFACE

PAGE = Path(__file__).parent / "page"
"""Files of the page: index.html, and those that are served below ``/static/``."""
_REFUSED: dict[str, Any] = {"model": Error, "description": "The request is refused; `error` says why."}
_FAILED: dict[str, Any] = {"model": Error, "description": "The server cannot do it now."}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",  # files of another version may have the same names
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def _reload(catalogue: Catalogue) -> None:
    """Reload a catalogue while requests are answered, and log the outcome."""
    try:
        await asyncio.to_thread(catalogue.reload)
        LOG.info(json.dumps({"event": "reloaded", "indexes": [*catalogue.indexes]}))
    except IrkitError as error:
        LOG.error(json.dumps({"event": "reload failed", "error": str(error)}))


def create_app(catalogue: Catalogue) -> FastAPI:
    """Make the application that serves a catalogue."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        await asyncio.to_thread(catalogue.warm)
        url = f"http://{catalogue.config.host}:{catalogue.config.port}/"
        LOG.info(json.dumps({"event": "ready", "url": url, "indexes": [*catalogue.indexes]}))
        if threading.current_thread() is threading.main_thread():  # of a process that only serves
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(_reload(catalogue)))
            # what is loaded stays; without it collections take little time, and release old files soon
            gc.collect()
            gc.freeze()
        yield {"catalogue": catalogue}  # for connections.py
        await catalogue.close()

    # every request passes the guard before it comes to a route
    app = FastAPI(
        title="irkit",
        version=INTERFACE,
        summary="Neural retrieval: embeddings, reranking and search.",
        lifespan=lifespan,
        docs_url=None,  # its scripts would come from another server
        redoc_url=None,
        responses={"4XX": _REFUSED, "5XX": _FAILED},
        exception_handlers=dict.fromkeys((IrkitError, RequestValidationError, HTTPException), handle),
    )
    app.state.catalogue = catalogue
    app.add_middleware(Guard, catalogue=catalogue)
    for module in (tei_routes, openai_routes, search_routes, document_routes):
        app.include_router(module.router)

    # routes for operators: health and metrics
    @app.get("/health", response_model=Status, tags=["operations"])
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Say that the process is alive."""
        return respond({"status": "ok"})

    @app.get("/ready", response_model=Readiness, responses={503: {"model": Readiness}}, tags=["operations"])
    async def ready() -> Response:
        """Say whether requests are taken."""
        return respond({"ready": catalogue.ready}, 200 if catalogue.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse, tags=["operations"])
    async def metrics() -> Response:
        """Return metrics in the format of Prometheus."""
        content, kind = exposition()
        return Response(content, headers={"content-type": kind})

    # the page
    files = {file.name: file for file in PAGE.iterdir()}

    @app.get("/", include_in_schema=False)
    @app.get("/static/{file}", include_in_schema=False)
    async def page(file: str = "index.html") -> Response:
        if file not in files:
            raise Problem(404, f"the page has no file {file[:60]!r}")
        return FileResponse(files[file], headers=_HEADERS)

    return app
