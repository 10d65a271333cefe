"""The device's rules on collectives: see rules.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.hostcuda.rules import here, rule, side


def shard(numel: int = 64) -> Tensor:
    return here(numel).mul_(1.0 + dist.get_rank())


_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(into: Tensor, own: Tensor) -> Any:
    return _gather(into, own, async_op=True)


def reduce(into: Tensor, full: Tensor) -> Any:
    return _reduce(into, full, async_op=True)


@rule("race")
def gathered_weights_are_read_after_the_wait(wrong: bool) -> None:
    full, own = torch.empty(128, device="cuda"), shard()
    work = gather(full, own)
    if not wrong:
        work.wait()
    full.sum()
    work.wait()


@rule("not a number")
def gathered_weights_arrive_with_the_wait(wrong: bool) -> str | None:
    full, own = torch.empty(128, device="cuda"), shard()
    work = gather(full, own)
    if not wrong:
        work.wait()
    total = full.sum().item()
    work.wait()
    return "not a number" if total != total else None


@rule("race")
def the_wait_is_of_the_stream_that_reads(wrong: bool) -> None:
    full, own = torch.empty(128, device="cuda"), shard()
    stream = side()
    work = gather(full, own)
    with torch.cuda.stream(stream):
        if not wrong:
            work.wait()
    if wrong:
        work.wait()
    with torch.cuda.stream(stream):
        full.sum()
    work.wait()
    torch.cuda.synchronize()


@rule("race")
def a_reduction_starts_once_the_gradient_is_written(wrong: bool) -> None:
    full, own = torch.empty(128, device="cuda"), torch.empty(64, device="cuda")
    stream = side()
    with torch.cuda.stream(stream):
        full.fill_(1.0)
    if not wrong:
        torch.cuda.current_stream().wait_stream(stream)
    reduce(own, full).wait()
    torch.cuda.synchronize()


@rule("race")
def a_collective_runs_after_the_stream_that_it_is_called_on(wrong: bool) -> None:
    full, own = here(128), torch.empty(64, device="cuda")
    stream = side()
    full.mul_(2.0)
    with torch.cuda.stream(stream):
        if not wrong:
            stream.wait_stream(torch.cuda.default_stream())
        reduce(own, full).wait()
    torch.cuda.synchronize()


@rule("early free")
def the_input_of_a_collective_outlives_it(wrong: bool) -> None:
    full, own = here(128), torch.empty(64, device="cuda")
    work = reduce(own, full)
    if not wrong:
        work.wait()
    full.untyped_storage().resize_(0)
    here(64)
    torch.cuda.synchronize()


@rule("early free")
def the_output_of_a_collective_outlives_it(wrong: bool) -> None:
    full, own = torch.empty(128, device="cuda"), shard()
    work = gather(full, own)
    if not wrong:
        work.wait()
    full.untyped_storage().resize_(0)
    here(64)
    torch.cuda.synchronize()


@rule("race")
def a_shard_in_flight_is_not_overwritten(wrong: bool) -> None:
    full, own = torch.empty(128, device="cuda"), shard()
    work = gather(full, own)
    if not wrong:
        work.wait()
    own.add_(1.0)
    work.wait()


@rule("race")
def two_collectives_of_one_communicator_are_in_order_and_the_caller_is_not(wrong: bool) -> None:
    full, own = torch.empty(128, device="cuda"), torch.empty(64, device="cuda")
    first = gather(full, shard())
    second = reduce(own, full)  # after the first, on the same stream
    (second if not wrong else first).wait()
    own.sum()
    second.wait()
    first.wait()


@rule("not supported for NCCL")
def collectives_take_dtypes_that_nccl_has(wrong: bool) -> None:
    values = torch.ones(4, dtype=torch.int16 if wrong else torch.int32, device="cuda")
    dist.all_reduce(values)
