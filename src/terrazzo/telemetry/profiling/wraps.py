"""Wraps the functions of torch that a step calls, so that the probe hears of them. Results do not change.

It is loaded by its path, as the probe is. Compiled code bypasses the wrappers, so that graphs stay the same.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from terrazzo.telemetry.profiling.probe import ScriptProbe

__all__ = ["begin"]

_KINDS = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce"),
    "all_gather": ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced", "gather"),
    "broadcast": ("broadcast", "scatter"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "send": ("send", "recv", "isend", "irecv", "batch_isend_irecv"),
    "control": (
        *("barrier", "monitored_barrier", "all_gather_object", "gather_object"),
        *("broadcast_object_list", "scatter_object_list"),
    ),
}


def begin(probe: ScriptProbe) -> None:
    """Have the probe measure this process, and its forks, from now on."""
    os.register_at_fork(after_in_child=probe.begin)
    atexit.register(probe.flush)
    _wrap_torch(probe)
    _wrap_exchanges(probe)


def _wrap_torch(probe: ScriptProbe) -> None:
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    optimizer.register_optimizer_step_pre_hook(lambda each, args, kwargs: probe.updates(each))
    optimizer.register_optimizer_step_post_hook(lambda each, args, kwargs: probe.updated(each))
    _wrap((torch.autograd,), "backward", lambda call: _within(probe.backward, call))
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        _wrap((clip_grad, torch.nn.utils), name, lambda call: _within(lambda: probe.during("clip"), call))
    _wrap((torch, torch.serialization), "save", lambda call: _within(lambda: probe.during("save"), call))
    _wrap((dataloader._BaseDataLoaderIter,), "__next__", lambda call: _within(probe.reading, call))
    _wrap((dataloader.DataLoader,), "__iter__", lambda call: _read(probe, call))
    _wrap((torch,), "compile", lambda call: _noting(probe, "compiles", call))
    _wrap((torch.amp.autocast_mode.autocast,), "__enter__", lambda call: _noting(probe, "autocasts", call))


def _wrap_exchanges(probe: ScriptProbe) -> None:
    if not dist.is_available():
        return
    for kind, names in _KINDS.items():
        for name in names:
            _wrap((dist, dist.distributed_c10d), name, functools.partial(_exchanging, probe, kind))
    waits = dist.Work.wait

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        return probe.wait(work, waits, args, kwargs)

    dist.Work.wait = wait  # type: ignore[method-assign,assignment]
    import torch.distributed._functional_collectives as functional

    _wrap((functional,), "wait_tensor", lambda call: _exchanging(probe, "exchange", call))
    from torch.nn.parallel import DistributedDataParallel

    _wrap((DistributedDataParallel,), "__init__", lambda call: _made(probe, call))
    _wrap((DistributedDataParallel,), "_sync_buffers", lambda call: _buffers(probe, call))


def _wrap(places: tuple[Any, ...], name: str, by: Callable[[Any], Any]) -> None:
    """Wrap the function `name`, which is the same one in all `places`, if this version of torch has it."""
    original = getattr(places[0], name, None)
    if original is not None:
        wrapped = by(original)
        for place in places:
            if getattr(place, name, None) is original:
                setattr(place, name, wrapped)


def _within(entering: Callable[[], Any], call: Any) -> Any:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with entering():
            return call(*args, **kwargs)

    return wrapped


def _noting(probe: ScriptProbe, name: str, call: Any) -> Any:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            probe.facts[name] = True
        return call(*args, **kwargs)

    return wrapped


def _exchanging(probe: ScriptProbe, kind: str, call: Any) -> Any:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        return probe.exchange(kind, call, args, kwargs)

    return wrapped


def _read(probe: ScriptProbe, call: Any) -> Any:
    """Wrap `iter(loader)`, which starts workers."""

    @functools.wraps(call)
    def wrapped(loader: Any) -> Any:
        if torch.is_grad_enabled():
            probe.facts |= {"workers": loader.num_workers, "persistent": bool(loader.persistent_workers)}
            probe.facts["cores"] = _cores()
        with probe.reading():
            return call(loader)

    return wrapped


def _cores() -> int:
    """The cores that a rank has if the ranks of this machine share them evenly."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, there // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _made(probe: ScriptProbe, call: Any) -> Any:
    """Wrap the making of a DDP model, whose all-reduces run in C++: it logs them, which on CUDA would synchronize."""

    @functools.wraps(call)
    def wrapped(model: Any, *args: Any, **kwargs: Any) -> None:
        call(model, *args, **kwargs)
        probe.facts["ddp"] = True
        if all(each.device.type == "cpu" for each in model.module.parameters()):
            model._set_ddp_runtime_logging_sample_rate(1)
            probe.models.add(model)

    return wrapped


def _buffers(probe: ScriptProbe, call: Any) -> Any:
    @functools.wraps(call)
    def wrapped(model: Any) -> None:
        probe.exchange("broadcast", lambda *, group: call(model), (), {"group": model.process_group})

    return wrapped
