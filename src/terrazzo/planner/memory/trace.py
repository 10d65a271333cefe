"""What a model holds between the begin and the end of a step, found by running it on tensors without memory.

One forward and backward pass under torch's fake tensors runs every operator by its shapes alone; each storage that one
makes is counted until it goes. The result knows nothing of plans: `replay` puts it on the schedule of one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["ActivationTrace", "TraceEvent", "traced_activations", "traced_update"]

TraceKind = Literal["enter", "leave", "backward", "gradient", "end"]


@dataclass(frozen=True)
class TraceEvent:
    """A moment of a pass, and what happened since the one before, in bytes.

    Attributes:
        kind: forward of the unit begins (`enter`), ends (`leave`); its backward begins; a gradient of one of its
            parameters is there; the pass ends.
        unit: name of the unit's module, empty for the root.
        rise: the most that was held in between, beyond what was held at the moment before.
        change: what is held now beyond that.
        parameter: whose gradient is there, by its name in the unit. `numel`: elements of that.
    """

    kind: TraceKind
    unit: str
    rise: int
    change: int
    parameter: str = ""
    numel: int = 0


@dataclass(frozen=True)
class ActivationTrace:
    """One forward and backward pass of one micro-batch.

    Attributes:
        events: in the order in which they came. The root's forward is around those of the other units.
        buffer_bytes: the model's buffers, there all the time.
    """

    events: tuple[TraceEvent, ...]
    buffer_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        live = peak = self.buffer_bytes
        for event in self.events:
            peak = max(peak, live + event.rise)
            live += event.change
        return peak

    def stretched(self, unit: str, copies: Sequence[str]) -> ActivationTrace:
        """The trace of a model in which units named `copies`, all alike, stand in the place of `unit`."""
        forward = [event for event in self.events if event.unit == unit and event.kind in ("enter", "leave")]
        backward = [event for event in self.events if event.unit == unit and event.kind not in ("enter", "leave")]
        events: list[TraceEvent] = []
        for event in self.events:
            if event is forward[0]:
                events += [_renamed(part, name) for name in copies for part in forward]
            elif event is backward[0]:
                events += [_renamed(part, name) for name in reversed(copies) for part in backward]
            elif event.unit != unit:
                events.append(event)
        return ActivationTrace(tuple(events), self.buffer_bytes)


def _renamed(event: TraceEvent, unit: str) -> TraceEvent:
    return TraceEvent(event.kind, unit, event.rise, event.change, event.parameter, event.numel)


def traced_activations(
    model: nn.Module, units: Sequence[str], dtype: torch.dtype, step: Callable[[nn.Module], Tensor]
) -> ActivationTrace:
    """Trace one pass. Parameters do not count, their gradients do until the pass has taken note of them.

    Args:
        model: on any device, best `meta`; its parameters are replaced, so it is of no use afterwards.
        units: names of the modules that are units, the root left out.
        dtype: that the model computes in; its floating-point parameters take it.
        step: makes a batch with ordinary torch functions, runs the model on it and returns the loss.
    """
    with (
        torch.random.fork_rng(devices=[]),
        _no_log(),
        FakeTensorMode(allow_non_fake_inputs=True),
        _Counter() as counter,
    ):
        with counter.paused():
            _replace_parameters(model, dtype)
        _replace_buffers(model)
        recorder = _Recorder(counter)
        recorder.watch(model, units)
        recorder.begin()
        step(model).backward()
        recorder.note("end", "")
    return ActivationTrace(tuple(recorder.events), recorder.buffer_bytes)


@contextmanager
def _no_log() -> Iterator[None]:
    """Operators that fake tensors cannot run are logged with a traceback; the error itself is enough."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def traced_update(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], numels: Sequence[int], dtype: torch.dtype
) -> int:
    """Bytes that an optimizer needs while it steps parameters of `numels` elements, beside what it keeps.

    Found by stepping small ones whose sizes are in the same proportion.

    Args:
        make: builds the optimizer over the parameters that it is given.
        numels: in the order of the optimizer's parameters.
        dtype: of parameters and gradients.
    """
    scale = max(numels) / _PROBE_NUMEL
    with _Counter() as counter:
        with counter.paused():
            parameters = [nn.Parameter(torch.zeros(max(1, round(numel / scale)), dtype=dtype)) for numel in numels]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer = make(parameters)
            optimizer.step()  # makes its state
        optimizer.step()
    return int(counter.peak_bytes * scale)


_PROBE_NUMEL = 4096
"""Elements of the largest: scalars hardly count beside it."""


class _Counter(TorchDispatchMode):
    """Bytes of the storages that operators make, from their making to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, Any] = {}
        self._counts = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside does not count."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            result = self._grouped_product(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _grouped_product(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The product of experts' matrices, of which fake tensors know only bf16, and CPUs other formats too."""
        with self.paused():
            first, second, *rest = args
            product: Tensor = func(first.bfloat16(), second.bfloat16(), *rest, **kwargs)
            return torch.empty_like(product, dtype=first.dtype)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        count_bytes = storage.nbytes() if self._counts else 0

        def gone(_: Any) -> None:
            del self._known[key]
            self.live_bytes -= count_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.live_bytes += count_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _Recorder:
    """Writes down the events of a pass."""

    def __init__(self, counter: _Counter) -> None:
        self.events: list[TraceEvent] = []
        self.buffer_bytes = 0
        self._counter = counter

    def begin(self) -> None:
        self.buffer_bytes = self._counter.live_bytes
        self._restart()

    def _restart(self) -> None:
        self._before_bytes = self._counter.peak_bytes = self._counter.live_bytes

    def note(self, kind: TraceKind, unit: str, parameter: str = "", numel: int = 0) -> None:
        counter, before = self._counter, self._before_bytes
        rise, change = counter.peak_bytes - before, counter.live_bytes - before
        self.events.append(TraceEvent(kind, unit, rise, change, parameter, numel))
        self._restart()

    def watch(self, model: nn.Module, units: Sequence[str]) -> None:
        """Hook into the units' forwards and backwards, and into their parameters' gradients."""
        for name in ("", *units):
            self._watch_unit(model.get_submodule(name), name)
        for path, parameter in model.named_parameters():
            if parameter.requires_grad:
                inside = [name for name in units if path.startswith(f"{name}.")]
                parameter.register_post_accumulate_grad_hook(self._take(path, max(inside, key=len, default="")))

    def _watch_unit(self, module: nn.Module, name: str) -> None:
        def before(*_: Any) -> None:
            self.note("enter", name)

        def after(_: Any, __: Any, output: Any) -> None:
            self.note("leave", name)
            announce = self._announcer(name)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(announce)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _announcer(self, name: str) -> Callable[[Tensor], None]:
        """Notes that the backward of a unit begins, whichever of its outputs comes first."""
        waiting = True

        def announce(_: Tensor) -> None:
            nonlocal waiting
            if waiting:
                self.note("backward", name)
            waiting = False

        return announce

    def _take(self, path: str, unit: str) -> Callable[[Tensor], None]:
        name = path.removeprefix(f"{unit}.")

        def take(parameter: Tensor) -> None:
            self.note("gradient", unit, name, parameter.numel())
            parameter.grad = None

        return take


def _replace_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                fresh = torch.empty(parameter.shape, dtype=kind, device="cpu")
                made[id(parameter)] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _replace_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
