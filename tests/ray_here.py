"""A stand-in for the module ``ray``, whose actors are objects of this process; they can be ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class Died(Exception):
    """An actor has ended."""


class Actor:
    """An actor, whose methods are called by ``actor.method.remote(...)``."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self.instance, self.alive, self.calls = make(*arguments), True, 0
        self.__ray_ready__ = SimpleNamespace(remote=lambda: lambda: None)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Callable[[], Any]:
            self.calls += 1
            if not self.alive:
                return self._die
            answer = getattr(self.instance, name)(*arguments)
            return lambda: answer

        return SimpleNamespace(remote=remote)

    def _die(self) -> None:
        raise Died


class RayHere:
    """What `irkit.ray_engine.ShardActors` calls of ``ray``."""

    exceptions = SimpleNamespace(
        RayTaskError=type("RayTaskError", (Exception,), {}), GetTimeoutError=TimeoutError, RayActorError=Died
    )

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self._cpus}

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda *arguments: Actor(kind, *arguments))
        )

    def put(self, value: Any) -> Any:
        return value

    def get(self, answers: Any, timeout: float | None = None) -> Any:
        return [answer() for answer in answers] if isinstance(answers, Sequence) else answers()

    def kill(self, actor: Actor) -> None:
        actor.alive = False
