"""The ways in which ranks compute attention together, by name, and what each asks of a model."""

from __future__ import annotations

from typing import Literal, get_args

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.parallel.context.chunks import BALANCES
from terrazzo.parallel.sharing_rules import computes_windows, shares_heads

__all__ = ["MODES", "Mode", "check_heads", "check_names", "check_window"]

Mode = Literal["gather", "ulysses", "ring"]
MODES: tuple[Mode, ...] = get_args(Mode)


def check_names(mode: str | None, balance: str) -> None:
    """Refuse a mode that is neither None nor one of `MODES`, and a balance that is not of `BALANCES`.

    Raises:
        BadInput: there.
    """
    for what, value, known in (
        ("context mode", MODES[0] if mode is None else mode, MODES),
        ("context balance", balance, BALANCES),
    ):
        if value not in known:
            raise BadInput(f"'{value}' is no {what}.{did_you_mean(str(value), known)} Use one of: {', '.join(known)}.")


def check_heads(mode: str, heads: int, cp: int, tp: int) -> None:
    """Refuse query heads, of the whole model, that the ranks do not divide, which `ulysses` needs.

    Raises:
        BadInput: there.
    """
    ranks = cp * tp
    if mode == "ulysses" and not shares_heads(heads, cp, tp):
        along = f"{ranks} ranks (cp {cp} x tp {tp})" if tp > 1 else f"{ranks} ranks (cp)"
        raise BadInput(
            f"Context mode 'ulysses' gives each of {along} the same number of heads, and {heads} heads do not"
            f" divide by {ranks}. Use mode 'gather', which needs no heads to divide, or ranks that divide {heads}."
        )


def check_window(mode: str, window: int | None, model: str = "this model") -> None:
    """Refuse sliding windows under `ring`, which would send keys around that no token sees.

    Args:
        model: of which the window is, for the message.

    Raises:
        BadInput: there.
    """
    if window is not None and not computes_windows(mode):
        raise BadInput(
            f"Context mode 'ring' computes causal and document masks, and {model} attends within a sliding window of"
            f" {window} tokens. Use mode 'gather' or 'ulysses'."
        )
