"""The command ``irkit``, also as ``python -m irkit``; Ctrl-C ends it without a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

from irkit.utils.signals import how_ended, interruptible


def main() -> NoReturn:
    """Run `irkit.cli.main`; Ctrl-C also ends the process quietly while the commands are still imported."""
    with interruptible():
        try:
            from irkit.cli import main as run

            run()
        except KeyboardInterrupt:
            word, code = how_ended()
            sys.stderr.write(f"irkit: {word}\n")
            sys.exit(code)


if __name__ == "__main__":
    main()
