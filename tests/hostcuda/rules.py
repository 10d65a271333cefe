"""A small program for every rule that the device checks, each right and with one thing wrong.

A rule's function gets `wrong`; what the device must say of the wrong program is in its decorator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from hostcuda.device import Watching

__all__ = ["RULES", "here", "pinned", "rule", "side"]

RULES: dict[str, tuple[Callable[[bool], object], str]] = {}
"""By name: the program, and the kind of finding, or the text of the error, that tells what is wrong with it."""


def rule(told: str) -> Callable[[Callable[[bool], object]], Callable[[bool], object]]:
    def enter(program: Callable[[bool], object]) -> Callable[[bool], object]:
        RULES[program.__name__] = program, told
        return program

    return enter


def here(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda")


def side() -> Any:
    """A stream that has waited for all that is done so far."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def pinned(*shape: int) -> Tensor:
    return torch.ones(shape).pin_memory()


# -- streams and events ------------------------------------------------------------------------------------------------


@rule("race")
def a_stream_waits_for_the_one_that_wrote(wrong: bool) -> None:
    stream, x = side(), here(64)
    if not wrong:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.sum()
    torch.cuda.synchronize()


@rule("race")
def an_event_is_recorded_after_what_it_stands_for(wrong: bool) -> None:
    stream, x = side(), torch.empty(64, device="cuda")
    event = torch.cuda.Event()
    if wrong:
        event.record()
    x.fill_(1.0)
    if not wrong:
        event.record()
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        x.sum()
    torch.cuda.synchronize()


@rule("race")
def an_event_that_is_recorded_again_stands_for_the_later_point(wrong: bool) -> None:
    stream, x, event = side(), here(64), torch.cuda.Event()
    event.record()
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        x.mul_(2.0)
        if not wrong:
            event.record()
    torch.cuda.current_stream().wait_event(event)
    x.add_(1.0)


@rule("race")
def who_writes_waits_for_who_reads(wrong: bool) -> None:
    x = here(64)
    stream = side()
    with torch.cuda.stream(stream):
        x.sum()
    if not wrong:
        torch.cuda.current_stream().wait_stream(stream)
    x.zero_()
    torch.cuda.synchronize()


@rule("race")
def lists_of_tensors_are_written_too(wrong: bool) -> None:
    xs = [here(8), here(8)]
    stream = side()
    with torch.cuda.stream(stream):
        torch._foreach_add_(xs, 1.0)
    if not wrong:
        torch.cuda.current_stream().wait_stream(stream)
    torch._foreach_norm(xs)
    torch.cuda.synchronize()


@rule("race")
def parts_of_a_tensor_are_apart_and_the_whole_is_not(wrong: bool) -> None:
    x = here(128)
    stream = side()
    with torch.cuda.stream(stream):
        x[:64].mul_(2.0)
    (x if wrong else x[64:]).mul_(3.0)
    torch.cuda.synchronize()


@rule("race")
def generic_streams_and_events_count_too(wrong: bool) -> None:
    stream, x, event = torch.Stream(device="cuda"), here(64), torch.Event(device="cuda")
    if not wrong:
        event.record()
    stream.wait_event(event)
    with stream:
        x.sum()
    torch.cuda.synchronize()


# -- memory ------------------------------------------------------------------------------------------------------------


@rule("early free")
def memory_is_freed_after_its_last_reader(wrong: bool) -> None:
    x = here(64)
    stream = side()
    with torch.cuda.stream(stream):
        x.sum()
    if not wrong:
        torch.cuda.current_stream().wait_stream(stream)
    del x
    here(64)  # may get that memory


@rule("early free")
def recorded_streams_keep_memory(wrong: bool) -> None:
    x = here(64)
    stream = side()
    with torch.cuda.stream(stream):
        x.sum()
    if not wrong:
        x.record_stream(stream)
    del x
    here(64)  # may get that memory


@rule("early free")
def a_storage_is_released_after_its_last_reader(wrong: bool) -> None:
    x = here(64)
    stream = side()
    with torch.cuda.stream(stream):
        x.sum()
    if not wrong:
        torch.cuda.current_stream().wait_stream(stream)
    x.untyped_storage().resize_(0)
    here(64)
    torch.cuda.synchronize()


@rule("whose memory has been released")
def what_has_been_released_is_not_used(wrong: bool) -> None:
    x = here(64)
    if wrong:
        x.untyped_storage().resize_(0)
    x.sum()


@rule("not a number")
def fresh_memory_is_written_before_it_is_read(wrong: bool) -> str | None:
    x = torch.empty(64, device="cuda")
    if not wrong:
        x.zero_()
    return "not a number" if x.sum().isnan().item() else None


@rule("early free")
def memory_of_a_stream_goes_back_to_that_stream(wrong: bool) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = here(64)
    torch.cuda.current_stream().wait_stream(stream)
    x.sum()
    if not wrong:
        stream.wait_stream(torch.cuda.current_stream())
    del x
    with torch.cuda.stream(stream):
        here(64)


# -- the host ----------------------------------------------------------------------------------------------------------


@rule("race")
def the_host_reads_pinned_memory_once_the_copy_has_ended(wrong: bool) -> None:
    x, on_host = here(64), pinned(64)
    on_host.copy_(x, non_blocking=True)
    if not wrong:
        torch.cuda.current_stream().synchronize()
    on_host.sum()


@rule("race")
def a_pinned_buffer_is_filled_again_once_its_copy_has_ended(wrong: bool) -> None:
    x, on_host = here(64), pinned(64)
    x.copy_(on_host, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if not wrong:
        event.synchronize()
    on_host.fill_(2.0)


@rule("early free")
def memory_is_unpinned_once_its_copy_has_ended(wrong: bool) -> None:
    x, on_host = torch.empty(64, device="cuda"), torch.ones(128)
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostRegister(on_host.data_ptr(), on_host.nbytes, 0)
    x.copy_(on_host[:64], non_blocking=True)
    ended, end = os.pipe()  # what a thread does to memory is not in the way, and no clock knows when it has ended

    def fill() -> None:
        with Watching():
            on_host[64:].fill_(3.0)
        os.close(end)

    thread = threading.Thread(target=fill)
    thread.start()
    os.read(ended, 1)
    os.close(ended)
    if not wrong:
        torch.cuda.synchronize()
    cudart.cudaHostUnregister(on_host.data_ptr())
    thread.join()


@rule("race")
def a_copy_out_waits_for_what_is_copied(wrong: bool) -> None:
    x, on_host, copies = torch.empty(64, device="cuda"), pinned(64), side()
    x.fill_(1.0)
    if not wrong:
        copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        on_host.copy_(x, non_blocking=True)
    torch.cuda.synchronize()


@rule("race")
def a_job_of_another_thread_has_ended_before_its_memory_is_used(wrong: bool) -> None:
    x, on_host = torch.empty(64, device="cuda"), pinned(64)
    filled: Future[None]
    with ThreadPoolExecutor(1) as thread:
        began = threading.Event()

        def fill() -> None:
            with Watching():
                on_host.fill_(3.0)
            began.set()

        filled = thread.submit(fill)
        if not wrong:
            filled.result()
        else:
            while not began.__dict__["_flag"]:  # it is over in fact, and nothing says so
                pass
        x.copy_(on_host, non_blocking=True)
    torch.cuda.synchronize()


@rule("foreign")
def a_thread_says_which_device_it_uses(wrong: bool) -> None:
    home = torch.cuda.current_device()

    def work() -> None:
        if not wrong:
            torch.cuda.set_device(home)
        elif torch.cuda.current_device() == home:  # a fresh thread stands on device 0
            torch.cuda.set_device(1 - home)
        torch.ones(4, device="cuda")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@rule("pageable")
def what_is_copied_without_waiting_is_pinned(wrong: bool) -> None:
    source = torch.ones(1 << 15)
    (source if wrong else source.pin_memory()).to("cuda", non_blocking=True)
    torch.cuda.synchronize()


@rule("tensors on CUDA and on the CPU")
def kernels_take_tensors_of_one_device(wrong: bool) -> None:
    torch.mm(here(4, 4), torch.ones(4, 4, device="cpu" if wrong else "cuda"))


@rule("a state on the CPU in a fused CUDA kernel")
def fused_kernels_take_their_states_from_the_device(wrong: bool) -> None:
    parameter = nn.Parameter(here(4))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = here(4)
    optimizer.step()
    if wrong:
        optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].cpu()
    optimizer.step()


@rule("hostcuda does not simulate")
def what_is_not_simulated_is_refused(wrong: bool) -> None:
    if wrong:
        torch.cuda.graph(torch.cuda.CUDAGraph())
