"""What settings of offload ask for, to a library that knows one tier for each state."""

from __future__ import annotations

from terrazzo.engine import Place
from terrazzo.errors import BadInput

__all__ = ["ON_CPU", "tier_and_share"]

ON_CPU = "the optimizer steps on the CPU once backward is done"
"""How libraries without a choice of `offload.step` do it, in words."""


def tier_and_share(text: str) -> tuple[str, float | None, bool]:
    """What a setting such as `offload.optim` asks for, to a library that knows one tier for each state.

    Returns:
        The furthest tier with a share, which has room for what the others would hold; the share that is off the
        device, None for all; and whether it is spread over two such tiers. What is no tier comes back as it is: it
        is for the source's findings to say.
    """
    try:
        shares = Place(tier=text).shares
    except BadInput:
        return text, None, False
    off = [share for tier, share in shares.items() if tier != "device"]
    return list(shares)[-1], None if "device" not in shares else sum(off), len(off) > 1
