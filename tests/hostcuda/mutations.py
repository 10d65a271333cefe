"""Faults put into the engine on purpose, each of which the device must find while a model trains."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hostcuda.device import FAULTS, Watching, report
from terrazzo.engine.buckets.gradients.gradient import Gradient
from terrazzo.engine.buckets.resting.buffer import Buffer
from terrazzo.engine.comm.collectives import NativeCollectives
from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.comm.transfer import Handle
from terrazzo.engine.offload.activations.moved_tensors import Copy, Route
from terrazzo.engine.offload.store import Store
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.device import Stream
from tests.hostcuda.cases import Case, train

__all__ = ["MUTATIONS", "findings_with"]

Patch = tuple[object, str, Callable[..., Any]]
MUTATIONS: dict[str, tuple[Patch, Case]] = {}


def mutation(owner: object, name: str, case: Case) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function takes the place of `owner.name`; `case` is what it must be found in."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS[function.__name__] = (owner, name, function), case
        return function

    return enter


def findings_with(name: str, folder: str) -> list[str]:
    """Kinds of faults that the device finds, and the error that ends the training, if one does."""
    patch, case = MUTATIONS[name]
    report.take()
    ended = []
    with Watching(), mock.patch.object(*patch):
        try:
            train(case, "cuda", folder)
        except Exception as error:
            ended = [f"{type(error).__name__}: {error}"]
        torch.cuda.synchronize()
    return sorted({finding.kind for finding in report.take() if finding.kind in FAULTS}) + ended


ZERO3, ON_CPU = Case(), Case(tier="@cpu")


@mutation(Handle, "wait", ZERO3)
def nobody_waits_for_collectives(self: Any) -> None:
    for work in self._works:
        work.deliver()
    self._works = self._keep = ()


@mutation(CommStreams, "lend", ZERO3)
def a_reduction_s_input_is_released_as_if_it_had_been_lent(self: Any, make: Callable[[], Tensor]) -> Tensor:
    return make()


@mutation(CommStreams, "wait", ZERO3)
def the_computation_does_not_wait_for_a_chain(self: Any, mark: Any) -> None:
    pass


@mutation(CommStreams, "further", ZERO3)
@contextlib.contextmanager
def a_division_does_not_wait_for_the_sum(self: Any, count: int) -> Iterator[None]:
    with aside():
        yield


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """On a stream that nobody waits for, and that waits for nobody."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@mutation(NativeCollectives, "_all_gather", ZERO3)
def a_gather_does_not_wait_for_the_shard(self: Any, full: Tensor, kind: str) -> Any:
    with aside():
        handle = next(moves := _all_gather(self, full, kind))
    yield handle
    try:
        next(moves)
    except StopIteration as stop:
        return stop.value


_all_gather = NativeCollectives._all_gather


@mutation(Gradient, "accumulate", ZERO3)
def gradients_are_written_after_their_reduction_starts(self: Any, *arguments: Any) -> None:
    with aside():
        _accumulate(self, *arguments)


_accumulate = Gradient.accumulate


@mutation(Handle, "wait", ZERO3)
def another_stream_waits_for_collectives(self: Any) -> None:
    with aside():
        _wait(self)


_wait = Handle.wait


@functools.cache
def another() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@mutation(torch.UntypedStorage, "resize_", ZERO3)
def gathered_weights_get_memory_of_another_stream(self: Any, size: int) -> Any:
    with torch.cuda.stream(another()):
        return _resize(self, size)


_resize = torch.UntypedStorage.resize_


@mutation(torch.optim.AdamW, "step", ZERO3)
def weights_are_stepped_on_beside_the_computation(self: Any, *arguments: Any) -> Any:
    with aside():
        return _step(self, *arguments)


_step = torch.optim.AdamW.step


@mutation(Buffer, "load", Case(tier="@cpu-all"))
def weights_come_from_the_host_beside_the_computation(self: Any, into: Tensor) -> Any:
    with aside():
        return (yield from _load(self, into))


_load = Buffer.load


def completing(wait: bool, end: bool) -> Callable[..., Any]:
    @contextlib.contextmanager
    def method(self: Any, after: Any) -> Iterator[None]:
        with self.inside():
            if wait:
                self.wait_event(after)
            yield
            if end:
                self.mark().synchronize()

    return method


too_early, too_soon_complete = completing(wait=False, end=True), completing(wait=True, end=False)
MUTATIONS["a_thread_s_copies_do_not_wait_for_the_computation"] = (Stream, "completing", too_early), ON_CPU
MUTATIONS["a_thread_s_copies_are_taken_for_complete_too_early"] = (Stream, "completing", too_soon_complete), ON_CPU


@mutation(Segment, "gradient", Case(tier="@cpu", step="backward"))
def an_update_does_not_wait_for_its_gradient(self: Any, finished: Any) -> Tensor:
    with finished.data.opened(self.range) as part:
        return part.to(device=self.device, dtype=self.parameter.dtype)


@mutation(Store, "save", ON_CPU)
def a_gradient_s_buffer_is_given_back_before_its_copy_has_ended(self: Any, state: Any, source: Any) -> Any:
    mark = Stream.current(self.device).mark()

    def save() -> None:
        with self.copies_out.inside():
            self.copies_out.wait_event(mark)
            for part in state.cuts(state.range):
                with state.opened(part, "replace") as data:
                    data.copy_(source.part(part), non_blocking=True)

    return self._writer.submit(save)


def stays(*arguments: Any) -> None:
    """In place of what it is called for."""


MUTATIONS["a_thread_that_copies_uses_the_first_device"] = (devices, "set_current", stays), ON_CPU


OFFLOADED = Case(checkpointing="offload")


@mutation(Copy, "wait", OFFLOADED)
def activations_are_used_before_they_are_back(self: Any) -> None:
    pass


@mutation(Route, "copy", OFFLOADED)
def activations_leave_before_they_are_computed(self: Any, source: Tensor, target: Tensor) -> Copy:
    with self.stream.inside():
        target.copy_(source, non_blocking=True)
    return Copy(Stream.current(self.device), self.stream.mark())
