"""Handle SIGTERM and SIGHUP like Ctrl-C.

The command line reports "terminated", "hung up" or "interrupted" and exits with 128 + the signal number.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_OURS = (signal.SIGTERM, signal.SIGHUP)
_came: list[signal.Signals] = []


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, so that ``finally`` blocks run.

    A signal that is ignored, as by ``nohup``, or that has a handler already, is not changed. Outside the main
    thread nothing is changed.
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
            if signal.getsignal(number) is _interrupt:  # a signal that has come stays ignored
                signal.signal(number, signal.SIG_DFL)


def how_ended() -> tuple[str, int]:
    """Return a word for the signal that ended the last `interruptible` block, and an exit code.

    The word is "terminated", "hung up" or "interrupted". The exit code is 128 plus the number of the signal.
    """
    number = _came[0] if _came else signal.SIGINT
    return _WORDS[number], 128 + number


def _interrupt(number: int, frame: FrameType | None) -> None:
    for ours in _OURS:  # `timeout` and shells send them twice, and the second one would interrupt the cleanup
        if signal.getsignal(ours) is _interrupt:
            signal.signal(ours, signal.SIG_IGN)
    _came.append(signal.Signals(number))
    raise KeyboardInterrupt
