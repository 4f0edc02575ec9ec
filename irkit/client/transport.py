"""Requests to a server over connections that threads share."""

from __future__ import annotations

import http.client
import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import SplitResult

from irkit.errors import BadKeyError, BadValueError, StorageError

_ATTEMPTS = 10  # while the server is busy


class Transport:
    """Sends requests to a server and returns the JSON of the answers; any number of threads may use one.

    Args:
        address: Address of the server.
        key: API key, if the server has keys.
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, address: SplitResult, key: str | None = None, timeout: float = 60) -> None:
        self._address, self._timeout = address, timeout
        self._idle: deque[http.client.HTTPConnection] = deque()  # which threads may share
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the JSON of the answer; wait and repeat it while the server is busy.

        If the answer is a stream of hits, the lines are joined into the answer of an ordinary search.

        Raises:
            BadKeyError: The server has nothing of this name or id.
            BadValueError: The server refuses the request.
            StorageError: The server fails or does not answer.
        """
        try:
            content = None if body is None else json.dumps(body).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadValueError(f"{method} {path}: {error}; expected what JSON can say") from error
        for attempt in range(1, _ATTEMPTS + 1):
            status, headers, data = self.exchange(method, self._address.path.rstrip("/") + path, content)
            if status != 429 or attempt == _ATTEMPTS:
                break
            seconds = headers.get("retry-after", "1")  # of a proxy, it may be a date
            time.sleep(float(seconds) if seconds.isdecimal() else 1)
        try:
            is_stream = headers.get("content-type") == "application/x-ndjson"
            answer = _join(data, body["queries"]) if is_stream else json.loads(data)
        except ValueError as error:
            raise StorageError(f"{method} {path}: status {status}, and no JSON; is it irkit?") from error
        told = answer if isinstance(answer, dict) else {}
        if status >= 400 or "error_type" in told:  # a stream that fails has the status 200
            wrong = status != 429 and (400 <= status < 500 or told.get("error_type") == "Validation")
            kind = BadKeyError if status == 404 else BadValueError if wrong else StorageError
            raise kind(f"{method} {path}: {told.get('error', answer)}")
        return answer

    def exchange(self, method: str, path: str, content: bytes | None) -> tuple[int, Any, bytes]:
        """Send a request over an idle connection, or over a new one; the server may have closed idle ones."""
        while True:
            connection, is_old = self._take_idle(), True
            if connection is None:
                connection, is_old = self._connect(), False
            try:
                connection.request(method, path, content, self._headers)
                response = connection.getresponse()
                answer = response.status, response.headers, response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not (is_old and isinstance(error, ConnectionError)):
                    address = f"{self._address.scheme}://{self._address.netloc}{path}"
                    raise StorageError(f"{method} {address}: {error}; is the server up?") from error
            else:
                self._idle.append(connection)
                return answer

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(cast(str, self._address.hostname), self._address.port, timeout=self._timeout)

    def close(self) -> None:
        """Close the connections that no thread uses."""
        while (connection := self._take_idle()) is not None:
            connection.close()

    def _take_idle(self) -> http.client.HTTPConnection | None:
        """Return a connection that no thread uses from now on; None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:  # another thread may have taken the last one
            return None


def _join(data: bytes, queries: Sequence[Any]) -> dict[str, Any]:
    """Return what a search without a stream would have answered, or the error at the end of a stream.

    Raises:
        ValueError: The stream is cut off.
    """
    parts: list[dict[str, Any]] = [json.loads(line) for line in data.splitlines()]
    *lines, end = parts or [{}]
    if "error" in end:
        return end
    if not end.get("done"):
        raise ValueError("the stream has no end")
    results: list[dict[str, Any]] = [
        {"query": query, "hits": [], "missing": end.get("missing", [])} for query in queries
    ]
    for line in lines:
        results[line["query"]]["hits"].append(line["hit"])
    return {"results": results}
