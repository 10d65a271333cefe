"""How many ranks there are, for libraries whose configuration leaves that to what starts them."""

from __future__ import annotations

from terrazzo.dialects.core.draft import Draft

__all__ = ["leave_to_launcher"]


def leave_to_launcher(draft: Draft, also: str = "") -> None:
    """Say with which words ranks are started. `also`: another launcher's."""
    ranks = draft.value("mesh.world")
    each = "N" if ranks is None else str(ranks)
    draft.implied("mesh.world", f"said to the launcher: {also}torchrun --nproc-per-node {each}")
