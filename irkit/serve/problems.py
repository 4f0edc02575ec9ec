"""Turn errors into answers: a status, and JSON that says what is wrong; never a traceback or a path."""

from __future__ import annotations

import errno
import json
import re
import traceback
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from irkit.errors import IrkitError, LockedError, StorageError

_TYPES = {
    400: "Validation",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "NotFound",
    408: "Timeout",
    409: "Conflict",
    413: "TooLarge",
    422: "Validation",
    424: "Backend",
    429: "Overloaded",
    499: "Closed",
    500: "Backend",
    503: "Unhealthy",
    507: "Storage",
}
_LONGEST = 500  # characters of a message, which may quote what was sent
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATH = re.compile(r"(?<![\w/])/(?:[\w.+@-]+/)*([\w.+@-]+)")  # of which only the last name is told
_names: dict[str, str] = {}  # of what this process serves, by place


class Problem(IrkitError):
    """An error with the status that a client gets."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def hide(place: str, name: str) -> None:
    """Let messages tell a name instead of a place: a path, which may have spaces or be relative, or a URI.

    A place without a slash is told: it may be a word of any message.
    """
    if "/" in place:
        _names[place] = name


def respond(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return JSON; numbers that JSON lacks are null."""
    try:
        content = pydantic_core.to_json(value, inf_nan_mode="null")
    except (pydantic_core.PydanticSerializationError, UnicodeError, ValueError):  # an unpaired surrogate
        content = json.dumps(value).encode()
    return Response(content, status, headers, media_type="application/json")


def problem_of(error: Exception) -> Problem:
    """Return the problem that an error of irkit, of a request or of the operating system is."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)  # whose string repeats the whole body
    places = "|".join(map(re.escape, sorted(_names, key=len, reverse=True))) or "(?!)"
    message = re.sub(rf"(?<![\w/])(?:{places})(?!\w)", lambda found: _names[found[0]], str(error))
    message = _PATH.sub(r"\1", message)
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail))
    if isinstance(error, LockedError):
        return Problem(409, message)
    if isinstance(error, StorageError):
        cause: BaseException | None = error
        while isinstance(cause, StorageError):  # an index of shards has one for that of a shard
            cause = cause.__cause__
        number = getattr(cause, "errno", None)
        if number in _FULL:
            return Problem(507, message)
        return Problem(503, f"{message}; reading goes on" if number in _READ_ONLY else message)
    if isinstance(error, IrkitError):
        return Problem(422, message)
    if isinstance(error, TimeoutError):
        return Problem(408, "the request took too long; ask for less at once")
    return Problem(500, "internal error; the log of the server has more under this request id")


def describe(problem: Problem, request_id: str, path: str = "") -> dict[str, Any]:
    """Return the JSON of a problem; below ``/v1/`` in the form of OpenAI, which its clients read."""
    kind = _TYPES.get(problem.status, "Validation" if problem.status < 500 else "Backend")
    message = str(problem)[:_LONGEST].encode("utf-8", "replace").decode()
    error: Any = message
    if path.startswith("/v1/"):
        error = {"message": message, "type": kind, "code": problem.status, "param": None}
    return {"error": error, "error_type": kind, "request_id": request_id}


def answer(problem: Problem, request_id: str, path: str) -> Response:
    """Return the answer to a request to a path that has a problem."""
    headers = {}
    if problem.status == 429:
        headers["Retry-After"] = "1"
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return respond(describe(problem, request_id, path), problem.status, headers)


async def handle(request: Request, error: Exception) -> Response:
    """Answer a request whose route raised an error that is expected, see `problem_of`."""
    problem = problem_of(error)
    # FastAPI's frames refer to the error, which has the body: a cycle, which stays until a collection
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__context__ = None  # frames that still run are not cleared
    return answer(problem, request.scope["state"]["request_id"], request.url.path)


def _invalid(error: RequestValidationError) -> Problem:
    """Say in one line which keys of a body are wrong; what was sent is not repeated."""
    items = error.errors()
    if any(item["type"] == "json_invalid" for item in items):
        return Problem(400, f"the body is not JSON: {items[0].get('ctx', {}).get('error', 'malformed')}")
    lines = [".".join(map(str, item["loc"])) + f": {item['msg']}" for item in items[:3]]
    return Problem(422, "; ".join(lines) + ("; ..." if len(items) > 3 else ""))
