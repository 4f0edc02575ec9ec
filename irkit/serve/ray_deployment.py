"""``irkit serve`` as a deployment of Ray Serve, whose replicas are started, watched and replaced by Ray.

``serve run irkit.serve.ray_deployment:deploy paths=words-index`` starts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from irkit.arguments import check_counts
from irkit.errors import BadTypeError, BadValueError, require
from irkit.serve.access import read_keys
from irkit.serve.serve_config import ServeConfig, ServeLimits

_KEYS = ("paths", "engine", "device", "dtype", "limits")


def deploy(arguments: Mapping[str, Any]) -> Any:
    """Return the application that ``serve run`` or ``ray.serve.run`` starts.

    Each replica opens the indexes and models, and answers as ``irkit serve`` does. Keys come from
    ``$IRKIT_SERVE_KEYS``.

    Args:
        arguments: ``paths``, a list or names separated by commas as ``irkit serve`` takes them; and if need
            be ``replicas`` (1), ``engine`` (``"ray"``: actors search the shards), ``device``, ``dtype`` and
            ``limits``, a mapping.

    Raises:
        BadTypeError: An argument is unknown.
        BadValueError: There is nothing to serve, or a value is out of range.
        MissingDependencyError: Ray Serve is not installed.

    Examples:
        >>> from ray import serve  # doctest: +SKIP
        >>> serve.run(deploy({"paths": ["words-index"], "engine": "ray"}))  # doctest: +SKIP
    """
    serve: Any = require("ray.serve", "ray", "Ray Serve")
    # check the arguments, which may be words of a command line
    unknown = sorted(set(arguments) - {*_KEYS, "replicas"})
    if unknown:
        raise BadTypeError(
            f"deploy: no argument is named {unknown[0]!r}; there are {', '.join((*_KEYS, 'replicas'))}"
        )
    paths = arguments.get("paths", ())
    paths = tuple(paths.split(",")) if isinstance(paths, str) else tuple(paths)
    if not paths:
        raise BadValueError("deploy: nothing was given; expected paths=DIR_OR_MODEL,...")
    try:
        replicas = int(arguments.get("replicas", 1))  # a string on the command line
    except (TypeError, ValueError):
        replicas = 0
    check_counts("deploy", replicas=replicas)
    options = {name: arguments[name] for name in _KEYS[1:-1] if name in arguments}
    config = ServeConfig(
        paths=paths, keys=read_keys(None), limits=ServeLimits(**arguments.get("limits", {})), **options
    )

    # the application, made in each replica
    def make() -> Any:
        from irkit.serve.server import make_app, set_up_logs

        set_up_logs()
        return make_app(config)

    deployment = serve.deployment(
        serve.ingress(make)(),
        name="irkit",
        num_replicas=replicas,
        max_ongoing_requests=config.limits.requests,
        ray_actor_options={"num_cpus": 0 if config.engine else 1},
    )
    return deployment.bind()
