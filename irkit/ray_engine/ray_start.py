"""Connect to Ray, or start it on this machine."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from irkit.arguments import brief
from irkit.errors import BadValueError, require


def parse_engine(engine: str) -> str | None:
    """Return the address in ``"ray"`` or ``"ray://address"``: None stands for Ray on this machine.

    Raises:
        BadValueError: The engine is unknown.
    """
    if engine == "ray":
        return None
    if isinstance(engine, str) and engine.startswith("ray://") and engine != "ray://":
        return engine
    raise BadValueError(f"engine {brief(engine)}: expected ray, or ray://HOST:PORT of a cluster")


def start_ray(address: str | None = None) -> Any:
    """Return the module ``ray``, connected to a cluster or to a Ray that listens on this machine only.

    If this process is already connected, the connection is kept.

    Args:
        address: As for ``ray.init``: ``"ray://host:10001"`` for a client of a cluster, ``"host:6379"`` or
            ``"auto"`` on a machine of the cluster. None starts Ray on this machine.

    Raises:
        MissingDependencyError: Ray is not installed.
        BadValueError: Ray does not answer at the address.
    """
    ray: Any = require("ray", "ray", "The engine ray")
    if ray.is_initialized():
        return ray
    with _own_handler():
        _connect(ray, address)
    return ray


@contextlib.contextmanager
def _own_handler() -> Iterator[None]:
    """Restore the SIGTERM handler of this process: Ray installs one that exits with code 15 in any case."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _connect(ray: Any, address: str | None) -> None:
    if address is not None:
        if address.startswith("ray://"):  # a client of Ray 2.60 sends its token only after this call
            tokens: Any = require("ray._private.authentication.authentication_token_setup", "ray", "A client")
            tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise BadValueError(
                f"connecting to Ray at {brief(address)}: {error}; expected a cluster that lets clients in "
                "there (ray start --head --ray-client-server-port PORT), and its token in ~/.ray/auth_token"
            ) from error
        return
    # with clusters enabled, Ray replaces 127.0.0.1 by the network address of this machine, and listens on
    # all addresses
    constants: Any = require("ray._private.ray_constants", "ray", "The engine ray")
    enabled, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        # "local" starts a new Ray; without an address, Ray joins any cluster already running on this machine
        ray.init(address="local", _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
