"""One connection of a client: closed if the client lets the server wait too long."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection of uvicorn, which alone would wait for ever for the rest of the headers.

    It is closed if nothing happened between two looks: the headers of a request did not arrive, or the client
    read nothing of an answer. What is left of the body of a request that was answered does not count.
    guard.py limits the time of bodies, and uvicorn that between two requests.
    """

    _timer: asyncio.TimerHandle | None = None
    _seen: tuple[Any, int] | None = (None, 0)
    """The last request and the unsent bytes of its answer at the last check; None during an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to look at the connection."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._patience(), self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Close the connection if nothing happened since the last look."""
        before, request, unsent = self._seen, self.cycle, self.transport.get_write_buffer_size()
        is_over = request is None or request.response_complete or self.transport.is_closing()
        self._seen = (request, unsent) if is_over else None
        if before and is_over and before[0] is request and before[1] <= unsent:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self._patience(), self._look)

    def _patience(self) -> float:
        """Return the seconds until the next look; app.py makes the state."""
        return float(self.app_state["catalogue"].config.limits.idle_seconds)
