"""torch's own data parallelism around a sharded model, or inside one that is to be sharded: refused by name."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from terrazzo.engine.model.engine import is_sharded
from terrazzo.errors import BadInput, Misuse

__all__ = ["check_unwrapped", "refuse_class"]

_INSTEAD = {
    "DistributedDataParallel": "plan='zero0' is the same: whole weights on every rank, gradients averaged",
    "DataParallel": "start one process per device with torchrun; plan='zero0' keeps whole weights on each",
    "FullyShardedDataParallel": "plan='full_shard' is the same, and so are its other strategies by their names",
    "FSDPModule": "plan='zero3' is the same; or import fully_shard from terrazzo in place of torch",
}


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that torch's data parallelism already averages, or shards.

    Raises:
        BadInput: there.
    """
    for name, module in model.named_modules():
        if (kind := _kind(type(module))) is not None:
            at = f"module {name!r}" if name else "the model"
            call = "fully_shard" if kind == "FSDPModule" else kind
            raise BadInput(
                f"tz.shard: {at} has been given to torch's {call}, which does the work that tz.shard is to do. Pass "
                f"the model without it: {_INSTEAD[kind]}."
            )


def refuse_class(kind: type) -> None:
    """Refuse the class that torch's fully_shard makes of a sharded model's.

    Raises:
        Misuse: there.
    """
    if _kind(kind) is not None:
        raise _wrapped("fully_shard", kind.__mro__[2].__name__, _INSTEAD["FSDPModule"])


def _refuse_wrapping(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or (kind := _kind(type(parent))) is None or kind == "FSDPModule":  # which holds what it did before
        return
    if any(map(is_sharded, child.modules())):
        raise _wrapped(kind, type(child).__name__, _INSTEAD[kind])


def _wrapped(call: str, wrapped: str, instead: str) -> Misuse:
    return Misuse(
        f"torch's {call} was given a {wrapped} that is sharded: tz.shard averages gradients and gathers weights by "
        f"itself. Remove {call}(...): {instead}."
    )


def _kind(kind: type) -> str | None:
    """Which of torch's wrappers a class is. Ours of the same name, made for torch's scripts, is none."""
    names = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.")]
    ours = any(base.__module__.startswith("terrazzo.integrations") for base in kind.__mro__)
    return None if ours else next((name for name in names if name in _INSTEAD), None)


# For good, and with the import: torch goes through its hooks without a lock, so that a hook that comes while another
# thread builds a model makes that one fail.
register_module_module_registration_hook(_refuse_wrapping)
