"""``python -m irkit`` is the command line."""

from irkit.cli import main

main()
