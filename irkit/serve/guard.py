"""What stands before all routes: limits, request ids, keys, logs and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from irkit.serve.access import check_access
from irkit.serve.catalogue import Catalogue
from irkit.serve.meters import REQUESTS, RUNNING, SECONDS
from irkit.serve.problems import Problem, answer, problem_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOG = logging.getLogger("irkit.serve")
OPEN = frozenset({"/", "/health", "/ready", "/ping"})
"""Paths whose GET needs no key and counts for no limit; and so do those below ``/static/``."""
_SMALL = 1 << 16  # bytes: about what a connection buffers anyway
_ID = re.compile(rb"[\w.:-]{1,64}")


class Guard:
    """Accepts a request, or refuses it with an answer that says why.

    It reads the whole body first, within limits of size and time, so that a slow client holds nothing but
    its bytes. The bytes of all large bodies together have a limit, too.
    """

    def __init__(self, app: App, catalogue: Catalogue) -> None:
        self._app, self._catalogue = app, catalogue
        self._running = 0
        self._held = 0  # bytes of large bodies, of requests that arrive or are in work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection, see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the answer of GET, whose body uvicorn leaves out
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"")
        request_id = sent_id.decode() if _ID.fullmatch(sent_id) else uuid.uuid4().hex[:16]
        scope.setdefault("state", {})["request_id"] = request_id
        status, start = 0, time.perf_counter()

        async def send_marked(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        error = ""
        try:
            await self._admit(scope, headers, receive, send_marked)
        except asyncio.CancelledError:
            raise
        except Exception as problem:
            if not isinstance(problem, Problem | TimeoutError):
                LOG.exception("request %s failed", request_id)
            error = f"{type(problem).__name__}: {problem}"[:300]
            if not status:
                await answer(problem_of(problem), request_id, scope["path"])(scope, receive, send_marked)
        finally:
            self._record(scope, request_id, status, time.perf_counter() - start, error)

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Check what can be checked before the route is known, read the body, and run the app."""
        path, method, limits = scope["path"], scope["method"], self._catalogue.config.limits
        if not path.isprintable():  # a route also matches its path with a line break at the end
            raise Problem(404, "no such path")
        if method == "GET" and (path in OPEN or path.startswith("/static/")):
            await self._app(scope, receive, send)
            return
        if not self._catalogue.ready:
            raise Problem(503, "the server is starting or shutting down")
        reads = method in ("GET", "OPTIONS") or (method == "POST" and not path.endswith("/documents"))
        keys = self._catalogue.config.keys
        check_access(keys, "read" if reads else "write", headers.get(b"authorization", b""))
        body = await self._read_body(headers, receive)
        try:
            if self._running >= limits.requests:
                raise Problem(429, f"{limits.requests} requests are in work already; try again in a second")
            self._running += 1
            RUNNING.inc()
            scope["state"]["ends"] = time.monotonic() + limits.seconds  # for changes, which wait for a lock
            try:
                async with asyncio.timeout(limits.seconds):
                    await _while_connected(self._app, scope, body, receive, send)
            finally:
                self._running -= 1
                RUNNING.dec()
        finally:
            self._held -= _counted(len(body))

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Return the body; its bytes are held until the caller takes them off.

        Raises:
            Problem: It is too large (413) or comes too slowly (408), too many others are there (429), or the
                client has gone (499).
        """
        limits, size = self._catalogue.config.limits, headers.get(b"content-length", b"0")
        most_held = max(limits.body_bytes, limits.bodies_bytes)
        too_large = f"the body is larger than the limit of {limits.body_bytes} bytes"
        too_many = "too many large bodies are in work already; try again in a second"
        # Refuse by the length that the client announces.
        if not size.isdigit() or int(size[:20]) > limits.body_bytes:
            raise Problem(413, too_large)
        if self._held + _counted(int(size)) > most_held:
            raise Problem(429, too_many)
        # Count what arrives, because a client need not announce a length, or the true one.
        parts, total, held = list[bytes](), 0, 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise Problem(499, "the client closed the connection")
                    parts.append(message.get("body", b""))
                    total += len(parts[-1])
                    if total > limits.body_bytes:
                        raise Problem(413, too_large)
                    self._held += _counted(total) - held
                    held = _counted(total)
                    if held and self._held > most_held:
                        raise Problem(429, too_many)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except BaseException as error:
            # Nobody takes the bytes of a failed request off.
            self._held -= held
            if isinstance(error, TimeoutError):
                text = f"the body did not arrive within {limits.body_seconds} seconds"
                raise Problem(408, text) from None
            raise
        finally:
            parts.clear()  # the traceback of an error would keep them

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float, error: str) -> None:
        """Count the request, and write a line of JSON about it."""
        route = getattr(scope.get("route"), "path", "unknown")
        name = scope["state"].get("served") or scope.get("path_params", {}).get("name", "")
        if name not in self._catalogue.indexes and name not in self._catalogue.models:
            name = ""  # from outside: it would make a series of numbers of its own
        REQUESTS.labels(route, name, status).inc()
        SECONDS.labels(route, name).observe(seconds)
        if LOG.isEnabledFor(logging.INFO) and route not in OPEN:
            facts = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "id": request_id,
                "method": scope["method"],
                "route": route,
                "name": name,
                "status": status,
                "ms": round(1000 * seconds, 2),
                "client": (scope.get("client") or [""])[0],
            }
            LOG.info(json.dumps(facts | ({"error": error} if error else {})))


def _counted(size: int) -> int:
    """Return how many bytes of a body count; a small one always finds room."""
    return size if size > _SMALL else 0


async def _while_connected(app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the app with a body, and cancel it when the client closes the connection.

    Raises:
        Problem: The client has gone (499, as nginx logs it); nobody gets this answer.
    """
    waiting, ended = [body], False
    gone = asyncio.Event()

    async def give() -> MutableMapping[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send_watched(message: MutableMapping[str, Any]) -> None:
        nonlocal ended
        ended = message["type"] == "http.response.body" and not message.get("more_body")
        await send(message)

    async def watch(work: asyncio.Task[Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        if not ended:  # after the last part of an answer, uvicorn says so, too
            work.cancel()

    work = asyncio.current_task()
    assert work is not None
    watcher = asyncio.create_task(watch(work))
    try:
        await app(scope, give, send_watched)
    except asyncio.CancelledError:
        if not gone.is_set():
            raise
        work.uncancel()
        raise Problem(499, "the client closed the connection") from None
    finally:
        watcher.cancel()
