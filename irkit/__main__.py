"""The command ``irkit``, also as ``python -m irkit``: Ctrl-C is quiet from the first moment on."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run `irkit.cli.main`, whose import alone takes long enough to be interrupted."""
    try:
        from irkit.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("irkit: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
