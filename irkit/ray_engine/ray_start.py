"""Connect to Ray, or start it on this machine."""

from __future__ import annotations

from typing import Any

from irkit.arguments import brief
from irkit.errors import BadValueError, require


def parse_engine(engine: str) -> str | None:
    """Return the address in ``"ray"`` or ``"ray://address"``: None stands for Ray on this machine.

    Raises:
        BadValueError: It is no engine.
    """
    if engine == "ray":
        return None
    if isinstance(engine, str) and engine.startswith("ray://") and engine != "ray://":
        return engine
    raise BadValueError(f"engine {brief(engine)}: expected ray, or ray://HOST:PORT of a cluster")


def start_ray(address: str | None = None) -> Any:
    """Return the module ``ray``, connected to a cluster or to a Ray that listens on this machine only.

    A connection that this process has already is kept.

    Args:
        address: As for ``ray.init``, such as ``"ray://host:10001"`` or ``"auto"``. None starts Ray here.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    ray: Any = require("ray", "ray", "The engine ray")
    if ray.is_initialized():
        return ray
    if address is not None:
        ray.init(address=address, log_to_driver=False)
        return ray
    # unless clusters are disabled, Ray takes the address of this machine in a network for 127.0.0.1, and
    # listens on all addresses
    constants: Any = require("ray._private.ray_constants", "ray", "The engine ray")
    enabled, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
    return ray
