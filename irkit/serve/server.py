"""Start the processes of a server; after SIGTERM they finish what they began, and exit with 0.

After SIGHUP a server continues with the current keys and indexes: one process reads them again, and
several are replaced one by one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from types import FrameType
from typing import Any

from irkit.serve.access import with_new_keys
from irkit.serve.serve_config import ServeConfig
from irkit.utils.atomic import explained

_VARIABLE = "IRKIT_SERVE_CONFIG"
"""Environment variable by which a worker process learns the configuration."""
_WORKER_SECONDS = 300  # until a worker process has loaded its models


def serve(config: ServeConfig) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        BadValueError: There is nothing to serve, or two things have one name.
        StorageError: A path is neither an index nor a model, or the port is taken.
    """
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    from irkit.serve.catalogue import check_paths, name_paths
    from irkit.serve.connections import Connection
    from irkit.serve.meters import PROCESSES

    name_paths(config.paths)  # checks them
    options: dict[str, Any] = {
        "http": Connection,
        "ws": "none",
        "timeout_graceful_shutdown": round(config.limits.shutdown_seconds),
        "timeout_worker_healthcheck": _WORKER_SECONDS,
        "access_log": False,  # guard.py writes what it would, and more
        "log_level": "warning",
        "server_header": False,
    }
    set_up_logs()
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(config.host, config.port))
        config = config.model_copy(update={"port": listening.getsockname()[1]})
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after its shutdown
            stack.callback(signal.signal, number, signal.signal(number, _ignore))
        if config.workers == 1:
            uvicorn.Server(uvicorn.Config(make_app(config), **options)).run([listening])
            return
        check_paths(config.paths)  # or else each process would say what is wrong, again and again
        # several processes accept connections of one socket, and count in one folder
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="irkit-serve-"))
        os.environ |= {_VARIABLE: config.model_dump_json(), PROCESSES: folder}
        factory = uvicorn.Config(f"{__name__}:worker_app", factory=True, workers=config.workers, **options)
        Multiprocess(factory, [listening]).run()


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        StorageError: The address is taken, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with explained(f"serving at {host}:{port}", "choose another --host or --port"):
        # asyncio turns Nagle's algorithm off only if the protocol is named; it would delay answers by 40 ms
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.set_inheritable(True)
        except BaseException:
            listening.close()
            raise
        return listening


def make_app(config: ServeConfig) -> Any:
    """Open the models and indexes, and make the application."""
    from irkit.serve.app import create_app
    from irkit.serve.catalogue import Catalogue

    return create_app(Catalogue(config))


def worker_app() -> Any:
    """Make the application in a worker process, with the keys of now."""
    set_up_logs()
    return make_app(with_new_keys(ServeConfig.model_validate_json(os.environ[_VARIABLE])))


def set_up_logs() -> None:
    """Write the log to standard error, a line of JSON for each request."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("irkit.serve").setLevel(logging.INFO)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; the server has ended already, or has not begun."""
