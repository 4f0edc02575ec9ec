"""A stand-in for the module ``ray``, whose actors are objects of this process; they can end or be silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class Died(Exception):
    """An actor has ended."""


class Actor:
    """An actor, whose methods are called by ``actor.method.remote(...)``."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self.instance, self.alive, self.silent, self.calls = make(*arguments), True, False, 0
        self.__ray_ready__ = SimpleNamespace(remote=lambda: lambda: None)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Callable[[], Any]:
            self.calls += 1
            if not self.alive:
                return lambda: self._raise(Died)
            if self.silent:
                return lambda: self._raise(TimeoutError)
            answer = getattr(self.instance, name)(*arguments)
            return lambda: answer

        return SimpleNamespace(remote=remote)

    def _raise(self, error: type[Exception]) -> None:
        raise error


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

    def wait(self, answers: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        for number, answer in enumerate(answers):
            try:
                answer()
            except TimeoutError:
                continue
            except Died:
                pass
            return [answer], [*answers[:number], *answers[number + 1 :]]
        return [], [*answers]

    def kill(self, actor: Actor) -> None:
        actor.alive = False
