"""Numbers that a gradient which is not here as a whole is multiplied, divided or clamped by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo.errors import Misuse

__all__ = ["beside", "check_numbers", "text_of"]


def check_numbers(*numbers: Any) -> None:
    """Refuse a number for each element, which ranks that hold other elements would take from the wrong places.

    Raises:
        Misuse: there.
    """
    for number in numbers:
        if torch.is_tensor(number) and number.numel() != 1:
            raise Misuse(
                f"A sharded gradient was multiplied, divided or clamped by a tensor of {number.numel()} elements: it "
                "takes one number. To mask elements, multiply the weight by the mask in the module's forward."
            )


def text_of(number: Any) -> str:
    """A number as ranks compare it; not what a tensor holds, which the host would wait for."""
    return "tensor" if torch.is_tensor(number) else repr(number)


def beside(data: Tensor, number: Any) -> Any:
    """The same where `data` is."""
    return number.to(data.device) if torch.is_tensor(number) else number
