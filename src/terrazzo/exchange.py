"""Exchanging small plain values between ranks as JSON, errors included: nothing that arrives is ever unpickled."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.process_groups import backends_by_device, timeout_s_of
from terrazzo.errors import BY_NAME, RanksApart, SaveFailed, TerrazzoError
from terrazzo.processes.ending import start_thread

__all__ = ["agree", "broadcast_json", "gather_json", "on_first", "patiently", "require_alike", "timeout_s", "together"]

ROUND_S = 1.0
"""Seconds between two rounds in which the ranks of `patiently` ask whether all are done."""
LAST_S = 5.0
"""Seconds for which the exit of a process waits for work of `patiently` that nobody needs any more."""

T = TypeVar("T")


def gather_json(value: Any) -> list[Any]:
    """Every rank's `value` (anything JSON can hold), in rank order, on every rank. Collective."""
    device = _device()
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    world_size = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(received, padded)
    return [json.loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(received, sizes, strict=True)]


def broadcast_json(value: Any) -> Any:
    """Rank 0's `value` (anything JSON can hold) on every rank, once all have come. Collective.

    Only rank 0 sends its value; in `gather_json` every rank sends as many bytes as the longest value has.
    """
    device = _device()
    encoded = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(encoded)], device=device)
    dist.all_reduce(size, dist.ReduceOp.MAX)  # and no broadcast, from which rank 0 would go on before the others come
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if encoded:
        data.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return json.loads(data.cpu().numpy().tobytes())


def _device() -> torch.device:
    """The device on which values are exchanged: the CPU if the group has a backend for it, else the group's device."""
    kinds = [*backends_by_device()]
    return devices.current("cpu" if "cpu" in kinds else kinds[0])


def timeout_s() -> float:
    """Seconds for which ranks of the default group wait for each other."""
    return timeout_s_of(None, _device())


def agree(problem: str | None) -> str | None:
    """The first rank's problem, on every rank; None when no rank has one. Collective."""
    return next((other for other in gather_json(problem) if other is not None), None)


def require_alike(told: Mapping[str, str]) -> None:
    """Refuse what ranks were told differently, before they go different ways. Collective.

    Args:
        told: each argument, in words; the same arguments on every rank.

    Raises:
        RanksApart: on every rank, with the first argument that differs, and two ranks that have it so.
    """
    first, *others = gather_json(dict(told))
    for name, value in first.items():
        for rank, other in enumerate(others, 1):
            if other[name] != value:
                raise RanksApart(
                    f"The ranks were told different things: {name} is {value} on rank 0 and {other[name]} on rank"
                    f" {rank}. Give every rank the same."
                )


def together(work: Callable[[], T], failed: type[TerrazzoError]) -> T:
    """Do `work`, which must not talk to other ranks; returns this rank's result once no rank has failed. Collective.

    Raises:
        TerrazzoError: on all ranks, of the first rank that has failed: its own kind if it is of the error tree,
            `failed` for an `OSError` that is not of a connection which may come back, and a plain `TerrazzoError`, with
            the traceback, for any other, which is a bug.
    """
    attempt = _Attempt.of(work, failed)
    _refuse(gather_json(attempt.problem), attempt)
    return attempt.result  # type: ignore[return-value]


def patiently(work: Callable[[], T], failed: type[TerrazzoError]) -> T:
    """`together`, for work that may take a rank longer than ranks wait for each other. Collective.

    The work is done in a thread, and must not talk to other ranks. Meanwhile all ranks ask in rounds whether everybody
    is done: a slow rank is waited for, and one that has died is noticed as in any collective. In that case the exit of
    this process waits for its own work no longer than `LAST_S`.
    """
    doing: Future[T] = Future()
    start_thread("terrazzo-patiently", partial(_fulfil, doing, work), lambda: None, patience_s=LAST_S)
    while not all(gather_json(bool(wait([doing], ROUND_S).done))):
        pass
    return together(doing.result, failed)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # it is raised where the result is asked for
        future.set_exception(error)


def on_first(work: Callable[[], T], failed: type[TerrazzoError] = SaveFailed) -> T:
    """Do `work` on rank 0 only; returns its result (anything JSON can hold) on every rank. Collective.

    Raises:
        TerrazzoError: on all ranks, as `together`.
    """
    attempt = _Attempt.of(lambda: json.dumps(work()), failed) if dist.get_rank() == 0 else _Attempt[str]()
    told, problem = broadcast_json([attempt.result, attempt.problem])
    _refuse([problem], attempt)
    value: T = json.loads(told)
    return value


_ProblemText = list[str]
"""The name of the error's class, its message, and for a bug the traceback, which no other rank could show."""


@dataclass(frozen=True)
class _Attempt(Generic[T]):
    """What has become of work: its result, or what other ranks are told of its error, and the error."""

    result: T | None = None
    problem: _ProblemText | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, work: Callable[[], T], failed: type[TerrazzoError]) -> _Attempt[T]:
        """Do `work`."""
        try:
            return cls(work())
        except Exception as error:  # whatever it was, the other ranks must not wait for this one
            return cls(problem=_told(error, failed), error=error)


def _told(error: Exception, failed: type[TerrazzoError]) -> _ProblemText:
    """What other ranks are told of an error."""
    if isinstance(error, TerrazzoError):
        return [next(kind.__name__ for kind in type(error).__mro__ if kind in BY_NAME.values()), str(error), ""]
    text = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    may_pass = failed.lasts and isinstance(error, ConnectionError | TimeoutError)
    if isinstance(error, OSError) and not may_pass:
        return [failed.__name__, text, ""]
    return [TerrazzoError.__name__, text, "".join(traceback.format_exception(error)).rstrip()]


def _refuse(problems: list[_ProblemText | None], own: _Attempt[Any]) -> None:
    """Raise the first problem of all ranks, if there is one; from this rank's error, if it is that one."""
    if (first := next((problem for problem in problems if problem is not None), None)) is not None:
        kind, text, trace = first
        cause = own.error if own.problem == first else None
        raise BY_NAME[kind](f"{text}\n{trace}" if trace and cause is None else text) from cause
