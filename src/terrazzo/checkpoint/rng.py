"""The states of a rank's random generators as plain JSON values, and back."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from terrazzo.engine.runtime import device as devices

__all__ = ["capture_rng", "restore_rng", "rng_problem"]


def capture_rng() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, and of the current CUDA device where CUDA is in use."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if (on_device := devices.generator_state()) is not None:
        state["cuda"] = _encode(on_device)
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators back into a state that `capture_rng` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state:
        devices.set_generator_state(_decode(state["cuda"]))


def rng_problem(state: Any) -> str | None:
    """What is wrong with a state from elsewhere, tried on generators of nobody's."""
    try:
        version, internal, gauss = state["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        keys, position, has_gauss, cached = state["numpy"]
        if (
            len(keys) != 624
            or not 0 <= position <= 624
            or has_gauss not in (0, 1)
            or not isinstance(gauss, float | None)
        ):
            return "a value is out of its range"  # numpy would read beyond its array
        legacy = np.random.RandomState()
        legacy.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(cached)))
        torch.Generator().set_state(_decode(state["torch"]))
        _decode(state.get("cuda", state["torch"]))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
