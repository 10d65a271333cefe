"""How many examples hypothesis makes of a property; `make test-long` asks for more."""

from __future__ import annotations

import os

__all__ = ["examples"]


def examples(count: int) -> int:
    """`count` times `TERRAZZO_EXAMPLES`."""
    return count * int(os.environ.get("TERRAZZO_EXAMPLES", "1"))
