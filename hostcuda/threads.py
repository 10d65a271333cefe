"""Who comes after whom on the host: threads, queues and futures; and what threads themselves do to pinned memory.

Known are `Thread.start` and `join`, `queue.SimpleQueue` and `Queue`, `concurrent.futures.Future`, and
`threading.Event`. Where threads agree in another way, one `tell`s and the other `hear`s.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hostcuda.library import native

__all__ = ["WATCHED", "Told", "Watching", "install", "tell"]

WATCHED: list[type[threading.Thread]] = []
"""Classes of threads that are `Watching` from their start to their end."""


class Told:
    """What a thread had done and knew when it said so."""

    def __init__(self) -> None:
        self._token = native.tell()

    def __del__(self) -> None:
        native.forget(self._token)

    def hear(self) -> None:
        """From here on this thread comes after that."""
        native.hear(self._token)


def tell() -> Told:
    """Whoever `hear`s the result comes after all that this thread has done or waited for so far."""
    return Told()


class Watching(TorchDispatchMode):
    """Inside, what this thread's own kernels read and write in pinned memory is checked like the device's uses."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (operator := _operator(function)).is_view:
            return function(*args, **kwargs)
        used = list(_tensors(operator.arguments, args, kwargs))
        device = kwargs.get("device")
        if not any(tensor.is_cuda for tensor, _ in used) and (device is None or torch.device(device).type == "cpu"):
            for tensor, writes in used:
                if tensor.device.type == "cpu" and tensor.numel():
                    native.use_on_host(tensor.data_ptr(), _span_bytes(tensor), writes, operator.name)
        return function(*args, **kwargs)


class _Operator(NamedTuple):
    """What a schema says, which torch makes anew whenever it is asked: names of arguments, and which are written."""

    name: bytes
    arguments: tuple[tuple[str, bool], ...]
    is_view: bool


@functools.cache
def _operator(function: Any) -> _Operator:
    schema = function._schema
    written = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    arguments = tuple(zip((each.name for each in schema.arguments), written, strict=True))
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return _Operator(str(function).encode(), arguments, is_view)


def _tensors(arguments: tuple[tuple[str, bool], ...], args: Any, kwargs: Any) -> Any:
    """Tensors among the arguments of an operator, and whether it writes each."""
    for index, (name, writes) in enumerate(arguments):
        value = args[index] if index < len(args) else kwargs.get(name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield item, writes


def _span_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def install() -> None:
    """From now on, order the host's threads as they order themselves."""
    _follow_starts()
    _follow_futures()
    _follow_events()
    _follow_queues()
    queue.SimpleQueue = _SimpleQueue  # type: ignore[misc]


class _SimpleQueue(queue.SimpleQueue[Any]):
    """Whoever takes something comes after whoever put it in."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put((tell(), item))

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        told, item = super().get(block, timeout)
        told.hear()
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)


def _follow_starts() -> None:
    start, join = threading.Thread.start, threading.Thread.join

    @functools.wraps(start)
    def follow_start(self: Any) -> None:
        self._hostcuda = tell()
        run = self.run

        def follow_run() -> None:
            del self.run  # or the thread would hold itself
            native.name_thread(self.name.encode())
            self._hostcuda.hear()
            try:
                if isinstance(self, tuple(WATCHED)):
                    with Watching():  # type: ignore[no-untyped-call]
                        run()
                else:
                    run()
            finally:
                self._hostcuda = tell()

        self.run = follow_run
        start(self)

    @functools.wraps(join)
    def follow_join(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive() and hasattr(self, "_hostcuda"):
            self._hostcuda.hear()

    threading.Thread.start, threading.Thread.join = follow_start, follow_join  # type: ignore[method-assign]


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tell_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._hostcuda = tell()
        return original(self, *args, **kwargs)

    return tell_first


def _hearing(original: Callable[..., Any], unless: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """`original`, and this thread comes after whoever told, but where it returns one of `unless`."""

    @functools.wraps(original)
    def hear_last(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            result = original(self, *args, **kwargs)
            return result
        finally:
            if hasattr(self, "_hostcuda") and not any(result is value for value in unless):
                self._hostcuda.hear()

    return hear_last


def _follow_futures() -> None:
    for name in ("set_result", "set_exception"):
        setattr(Future, name, _telling(getattr(Future, name)))
    for name in ("result", "exception"):
        setattr(Future, name, _hearing(getattr(Future, name)))
    Future.done = _hearing(Future.done, unless=(False,))  # type: ignore[method-assign]


def _follow_events() -> None:
    event = threading.Event
    event.set = _telling(event.set)  # type: ignore[method-assign]
    event.wait = _hearing(event.wait, unless=(False,))  # type: ignore[method-assign]
    event.is_set = _hearing(event.is_set, unless=(False,))  # type: ignore[method-assign]


def _follow_queues() -> None:
    """A queue's lock orders all who put something in or take something out."""
    for name in ("put", "get"):
        setattr(queue.Queue, name, _taking_turns(getattr(queue.Queue, name)))


def _taking_turns(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if original.__name__ == "put":
            self._hostcuda = _after(self)
        result = original(self, *args, **kwargs)
        _after(self)
        return result

    return turn


def _after(turns: Any) -> Told:
    """What this thread knows, once it comes after whoever had the last turn."""
    if hasattr(turns, "_hostcuda"):
        turns._hostcuda.hear()
    return tell()
