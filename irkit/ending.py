"""How signals end the command line: SIGTERM and SIGHUP as Ctrl-C does, each with a word and an exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["how_ended", "interruptible"]

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_OURS = (signal.SIGTERM, signal.SIGHUP)
_came: list[signal.Signals] = []


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that whatever cleans up does.

    A signal that is ignored, as by ``nohup``, or handled already stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _came.clear()
    handled = [number for number in _OURS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) is _interrupt:  # one that came stays ignored
                signal.signal(number, signal.SIG_DFL)


def how_ended() -> tuple[str, int]:
    """What a KeyboardInterrupt was: a word for it, and the exit code, 128 and the number of the signal."""
    number = _came[0] if _came else signal.SIGINT
    return _WORDS[number], 128 + number


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in _OURS:  # `timeout` and shells send them twice, and the second would interrupt the cleanup
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, signal.SIG_IGN)
    _came.append(signal.Signals(number))
    raise KeyboardInterrupt
