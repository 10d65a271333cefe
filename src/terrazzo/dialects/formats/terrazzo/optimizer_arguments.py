"""What the optimizers that can be sharded take, by the signatures of their classes."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from terrazzo.config import MuonConfig
from terrazzo.dialects.formats.shared.class_defaults import signature_defaults
from terrazzo.engine import ELEMENTWISE
from terrazzo.optim import AdEMAMix, Lion, Muon

__all__ = ["OPTIMIZERS", "argument_defaults", "arguments"]

_OWN = (Lion, AdEMAMix, Muon)
OPTIMIZERS = {each.__name__: each for each in sorted((*ELEMENTWISE, *_OWN), key=lambda each: each.__name__)}
"""Classes by name."""


def arguments(name: str) -> Collection[str]:
    """What an optimizer takes; of Muon those are AdamW's, and beside them its own of matrices."""
    own = [f"muon.{key}" for key in MuonConfig.model_fields] if name == Muon.__name__ else []
    return {*_signature(name), *own}


def argument_defaults(name: str) -> dict[str, Any]:
    """The pair of betas and the eps that hold where nothing is said, as far as an optimizer has them."""
    return {key: each for key, each in signature_defaults(_signature(name)).items() if key in ("betas", "eps")}


def _signature(name: str) -> dict[str, inspect.Parameter]:
    stepped = "AdamW" if name == Muon.__name__ else name
    return dict(inspect.signature(OPTIMIZERS[stepped]).parameters) if stepped in OPTIMIZERS else {}
