"""`terrazzo`, and `python -m terrazzo`: the command line, which Ctrl-C ends in silence while it is still imported."""

from __future__ import annotations

import sys

from terrazzo.exit_codes import INTERRUPTED


def main() -> None:
    """Import the command line, run it, and end the process with its exit code."""
    try:
        from terrazzo.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
