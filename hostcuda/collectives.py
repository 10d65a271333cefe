"""NCCL over gloo: groups of the backend `nccl` as torch makes them, whose collectives run on streams.

Values go through the hosts' memory at once, summed in rank order; they arrive in the device's memory when somebody
waits for them. What is asynchronous runs on the communicator's own stream, after all that the caller's stream has
queued; what is not, on the caller's. Collectives of one communicator come one after the other, and so do its messages
from or to one rank.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from hostcuda.lanes import LINKS, LISTENERS, Carried, Lane, Launched, Moment
from hostcuda.library import native

__all__ = ["install"]

Values = Sequence[Tensor] | Callable[[], Sequence[Tensor]]
"""What a collective has found for what it writes; or how to find it, where that is not there yet."""

_DTYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
"""What NCCL can send; see `ncclDataType` in torch's NCCLUtils."""


_TOLD_BYTES = 16
"""Of a `Moment`."""


class _Options:
    """In place of `ProcessGroupNCCL.Options`."""

    is_high_priority_stream = False
    global_ranks_in_group: Sequence[int] = ()
    group_name = ""
    _timeout = timedelta(minutes=10)


_alive: list[_Nccl] = []
"""Groups hold what torch made of a communicator, and not the object that it is here."""


class _Nccl(c10d.ProcessGroupGloo):
    """In place of `ProcessGroupNCCL`: carries the values, as bytes, and is one communicator of the device."""

    Options = _Options  # type: ignore[assignment]

    def __init__(self, store: Any, rank: int, size: int, options: _Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        ranks = list(options.global_ranks_in_group) or list(range(size))
        self._near = ranks[-1] - ranks[0] == len(ranks) - 1
        self._name = options.group_name
        self._lanes: dict[str, Lane] = {}
        self._told = self.heard = Moment(0.0, 0.0)
        self.under_way: set[_Work] = set()
        self._messages: dict[tuple[int, int], int] = {}
        self._sending: list[tuple[Any, Tensor]] = []
        _alive.append(self)

    def run(self, call: _Call) -> _Work:
        """Begin a collective."""
        for tensor in (*call.reads, *call.writes):
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        lane = self._lane(call.lane)
        stream = lane.enter(call.asynchronous)
        where = stream.device_index, stream.stream_id
        carried = Carried(call.name, self._near, self._seconds(call))
        self._told = self.heard = Moment(native.ready_s(*where), carried.seconds)
        values = call.values(self)
        for listener in LISTENERS:
            listener.append(carried)
        number = lane.launch(stream, self.heard)
        for writes, tensors in enumerate((call.reads, call.writes)):
            for tensor in tensors:
                native.use(*where, tensor.data_ptr(), tensor.nbytes, writes, call.name.encode())
        work = _Work(self, lane, call, lane.leave(stream, number), values)
        if callable(values):
            lane.expect(work)
        self.under_way.add(work)
        return work

    def _lane(self, name: str) -> Lane:
        return self._lanes.setdefault(name, Lane(" ".join(filter(None, [f"NCCL of {self._name}", name]))))

    def message(self, tensor: Tensor, source: int, to: int) -> Values:
        """What is in a contiguous tensor goes to a rank, or comes from one: then it is there once that is called.

        Of two ranks, messages in one direction come in the order in which they were sent: there are no tags.
        """
        number = self._messages[source, to] = self._messages.get((source, to), 0) + 1
        parcel = self._parcel(tensor)
        name, peer = ("send", to) if source == self.rank() else ("recv", source)
        work = getattr(c10d.ProcessGroupGloo, name)(self, [parcel], peer, number)

        def values() -> list[Tensor]:
            work.wait()
            return self._unpacked(parcel.unsqueeze(0), tensor.dtype)

        if peer == source:
            return values
        self._sending.append((work, parcel))  # until it has gone
        self._sending = [each for each in self._sending if not each[0].is_completed()]
        return []

    def everyones(self, tensor: Tensor) -> list[Tensor]:
        """Each rank's values of a contiguous tensor, on the host, flat."""
        own = self._parcel(tensor)
        parcels = torch.empty(self.size(), own.nbytes, dtype=torch.uint8)
        _quietly(self, "_allgather_base", parcels.view(-1), own)
        return self._unpacked(parcels, tensor.dtype)

    def _parcel(self, tensor: Tensor) -> Tensor:
        """The bytes of a contiguous tensor, with when this rank has come to the exchange."""
        told = torch.tensor(self._told, dtype=torch.float64)
        return torch.cat([told.view(torch.uint8), _alias(tensor).clone().view(-1).view(torch.uint8)])

    def _unpacked(self, parcels: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """What is in parcels; when the last was sent is `heard`."""
        told, values = parcels.split([_TOLD_BYTES, parcels.shape[1] - _TOLD_BYTES], dim=1)
        self.heard = Moment(*told.reshape(-1).view(torch.float64).view(-1, len(Moment._fields)).amax(0).tolist())
        return [row.clone().view(dtype) for row in values]

    def _seconds(self, call: _Call) -> float:
        if call.messages is not None:
            steps = [nbytes for rank, nbytes in enumerate(call.messages) if rank != self.rank() and nbytes]
        else:
            step_bytes = max(tensor.nbytes for tensor in (*call.reads, *call.writes)) / self.size()
            steps = [step_bytes] * (call.trips * (self.size() - 1))
        return sum(steps) / (LINKS.near if self._near else LINKS.far) + len(steps) * LINKS.hop_s


def _quietly(group: Any, name: str, *arguments: Any) -> None:
    getattr(c10d.ProcessGroupGloo, name)(group, *arguments).wait()


@dataclass
class _Call:
    """A collective: what it reads and writes on the device, and what it finds, given a communicator.

    Attributes:
        trips: how often its largest tensor goes over the links.
        messages: bytes to each rank, where these differ from what a ring would carry.
        lane: in which it comes behind others.
    """

    name: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    values: Callable[[_Nccl], Values]
    asynchronous: bool
    trips: int = 1
    messages: Sequence[float] | None = None
    lane: str = ""


class _Work(dist.Work):
    """A collective under way. Its tensors are kept until somebody waits for it, as NCCL's are."""

    def __init__(self, nccl: _Nccl, lane: Lane, call: _Call, launched: Launched, values: Values) -> None:
        super().__init__()
        self._nccl, self._lane, self._call, self._launched, self._values = nccl, lane, call, launched, values

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits. Only now are the values there: who reads before finds what was in the memory."""
        self._lane.arrive(self)
        torch.cuda.current_stream().wait_event(self._launched.done)
        self.deliver()
        return True

    def arrive(self) -> None:
        assert callable(self._values), "what is sent is there"
        self._values = self._values()
        self._lane.postpone(self._launched, self._nccl.heard)

    def deliver(self) -> None:
        if self in self._nccl.under_way:
            self._nccl.under_way.remove(self)
            assert not callable(self._values), "it has arrived"
            for tensor, values in zip(self._call.writes, self._values, strict=True):
                _alias(tensor).view(-1).copy_(values)
            del self._call, self._values

    def is_completed(self) -> bool:
        self._lane.arrive(self)
        self._launched.done.query()
        self.deliver()
        return True

    def synchronize(self) -> None:
        self.wait()


def _alias(tensor: Tensor) -> Tensor:
    made: Tensor = torch.ops.hostcuda.alias(tensor.detach())
    return made


def _reduced(rows: Sequence[Tensor], op: Any) -> Tensor:
    ops: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add, "AVG": torch.add, "MAX": torch.maximum, "MIN": torch.minimum,
    }  # fmt: skip
    name = next((name for name in ops if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise NotImplementedError(f"hostcuda does not simulate reductions by {op}")
    total = functools.reduce(ops[name], rows[1:], rows[0].clone())
    return total / len(rows) if name == "AVG" else total


def _all_reduce(tensors: Sequence[Tensor], options: Any) -> _Call:
    def values(nccl: _Nccl) -> list[Tensor]:
        return [_reduced(nccl.everyones(tensor), options.reduceOp) for tensor in tensors]

    return _Call("all_reduce", tensors, tensors, values, options.asyncOp, trips=2)


def _reduce(tensors: Sequence[Tensor], options: Any) -> _Call:
    def values(nccl: _Nccl) -> list[Tensor]:
        rows = [nccl.everyones(tensor) for tensor in tensors]
        root = nccl.rank() == options.rootRank
        return [_reduced(row, options.reduceOp) if root else row[nccl.rank()] for row in rows]

    return _Call("reduce", tensors, tensors, values, options.asyncOp)


def _broadcast(tensors: Sequence[Tensor], options: Any) -> _Call:
    def values(nccl: _Nccl) -> list[Tensor]:
        return [nccl.everyones(tensor)[options.rootRank] for tensor in tensors]

    return _Call("broadcast", tensors, tensors, values, options.asyncOp)


def _all_gather(output: Tensor, own: Tensor, options: Any) -> _Call:
    return _Call("all_gather", [own], [output], lambda nccl: [torch.cat(nccl.everyones(own))], options.asyncOp)


def _all_gather_lists(outputs: Sequence[Sequence[Tensor]], owns: Sequence[Tensor], options: Any) -> _Call:
    def values(nccl: _Nccl) -> list[Tensor]:
        return nccl.everyones(owns[0])

    return _Call("all_gather", owns, outputs[0], values, options.asyncOp)


def _reduce_scatter(output: Tensor, full: Tensor, options: Any) -> _Call:
    def values(nccl: _Nccl) -> list[Tensor]:
        rows = [row.view(nccl.size(), -1)[nccl.rank()] for row in nccl.everyones(full)]
        return [_reduced(rows, options.reduceOp)]

    return _Call("reduce_scatter", [full], [output], values, options.asyncOp)


def _all_to_all(received: Tensor, sent: Tensor, coming: Sequence[int], going: Sequence[int], options: Any) -> _Call:
    """`coming` and `going`: rows from and to each rank; empty where all are alike."""

    def values(nccl: _Nccl) -> list[Tensor]:
        nccl.everyones(sent[:0])  # when each has come to it
        found = torch.empty(received.shape, dtype=received.dtype)
        _quietly(nccl, "alltoall_base", found, _alias(sent).clone(), list(coming), list(going))
        return [found.view(-1)]

    row_bytes = sent.nbytes / max(len(sent), 1)
    messages = [rows * row_bytes for rows in going] or None
    return _Call("all_to_all", [sent], [received], values, options.asyncOp, messages=messages)


def _send(tensors: Sequence[Tensor], to: int, tag: int) -> _Call:
    (own,) = tensors
    return _message("send", [own], [], to, lambda nccl: nccl.message(own, nccl.rank(), to))


def _receive(tensors: Sequence[Tensor], source: int, tag: int) -> _Call:
    (into,) = tensors
    return _message("recv", [], [into], source, lambda nccl: nccl.message(into, source, nccl.rank()))


def _message(
    name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], peer: int, values: Callable[[_Nccl], Values]
) -> _Call:
    nbytes = sum(tensor.nbytes for tensor in (*reads, *writes))
    messages = [nbytes * (rank == peer) for rank in range(peer + 1)]
    return _Call(name, reads, writes, values, asynchronous=True, messages=messages, lane=f"{name} {peer}")


_CALLS: dict[str, Callable[..., _Call]] = {
    "allreduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather_lists,
    "all_gather_single": _all_gather,
    "_allgather_base": _all_gather,
    "reduce_scatter_single": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter,
    "send": _send,
    "recv": _receive,
    "alltoall_base": _all_to_all,
    "all_to_all_single": _all_to_all,
}


def _method(name: str, call: Callable[..., _Call]) -> Callable[..., Any]:
    """A method of `ProcessGroup`: on the device, collectives go to the communicator; all else is torch's."""
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def method(self: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        nccl = _communicator(self, arguments)
        if nccl is None:
            return original(self, *arguments, **keywords)
        planned = call(*arguments, **keywords)
        work = nccl.run(planned)
        if not planned.asynchronous:
            work.wait()
        return work

    return method


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: Any) -> NoReturn:
        raise NotImplementedError(f"hostcuda does not simulate {name}")

    return refuse


def _communicator(group: dist.ProcessGroup, arguments: Sequence[Any]) -> _Nccl | None:
    first = arguments[0]
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if not (isinstance(first, Tensor) and first.is_cuda):
        return None
    backend = group._get_backend(torch.device("cuda"))
    return backend if isinstance(backend, _Nccl) else None


def _barrier_on_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """There it is an all-reduce of one element, which the host waits for."""

    @functools.wraps(original)
    def barrier(self: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        options = arguments[0] if arguments else keywords.get("opts")
        if options is None or options.device is None or options.device.type != "cuda":
            return original(self, *arguments, **keywords)
        dist.all_reduce(torch.zeros(1, device="cuda"), group=self)
        torch.cuda.current_stream().synchronize()
        return None

    return barrier


def install() -> None:
    """From now on torch makes such communicators wherever `nccl` is asked for."""
    group = dist.ProcessGroup
    for name, call in _CALLS.items():
        if hasattr(group, name):
            setattr(group, name, _method(name, call))
    group.barrier = _barrier_on_device(group.barrier)  # type: ignore[method-assign]
    c10d.ProcessGroupNCCL = _Nccl  # type: ignore[misc, assignment]
    c10d._NCCL_AVAILABLE = True
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these are registered already is the point
        for name in torch._C._dispatch_get_all_op_names():  # where whatever else there is would find gloo
            if name.startswith("c10d::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                _LIBRARY.impl(name.removeprefix("c10d::"), _refusal(name), "CUDA", allow_override=True)


_LIBRARY = torch.library.Library("c10d", "IMPL")
