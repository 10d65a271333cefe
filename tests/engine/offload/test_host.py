"""Host memory: pieces that never overlap, pinning asked for once, and a pool that stops growing."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo.engine.offload.activations import host_pool
from terrazzo.engine.offload.activations.host_pool import HostBuffer, HostPool
from terrazzo.engine.offload.host_arena import HostArena
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput, Misuse

PAGE = 4096


# -- the arena ---------------------------------------------------------------------------------------------------------


def test_pieces_start_on_pages_and_keep_what_is_written() -> None:
    sizes = [1, PAGE, PAGE + 1, 0, 10 * PAGE, 5000]
    arena = HostArena(sum(-(-size // PAGE) * PAGE for size in sizes), pin_for=None)
    pieces = [arena.allocate(size) for size in sizes]
    assert [piece.numel() for piece in pieces] == sizes
    assert all(piece.dtype == torch.uint8 and piece.data_ptr() % PAGE == 0 for piece in pieces)
    assert all(int(piece.sum()) == 0 for piece in pieces)
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert [set(piece.tolist()) for piece in pieces] == [{1}, {2}, {3}, set(), {5}, {6}]


def test_an_arena_gives_no_more_than_it_has() -> None:
    arena = HostArena(3 * PAGE - 5, pin_for=None)
    assert arena.size_bytes == 3 * PAGE
    arena.allocate(PAGE + 1)
    with pytest.raises(Misuse, match=r"4,097 bytes .* 4,096 of its 12,288 left"):
        arena.allocate(PAGE + 1)
    arena.allocate(PAGE)
    with pytest.raises(Misuse, match=r"1 bytes .* 0 of its 12,288 left"):
        arena.allocate(1)
    with pytest.raises(Misuse, match="-1 bytes"):
        arena.allocate(-1)


def test_tensors_outlive_their_arena() -> None:
    arena = HostArena(64 * PAGE, pin_for=None)
    piece = arena.allocate(64 * PAGE).fill_(7)
    arena.close()
    arena.close()
    with pytest.raises(Misuse, match="closed"):
        arena.allocate(1)
    del arena
    gc.collect()
    assert int(piece.min()) == int(piece.max()) == 7


@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_memory_that_the_system_refuses(size: int) -> None:
    with pytest.raises(BadInput, match="GiB of host memory"):
        HostArena(size, pin_for=None)


GPU = torch.device("cuda", 3)


class Cudart:
    """Stands in for the CUDA runtime, and records what it is asked."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls, self.device = code, list[tuple[Any, ...]](), torch.device("cuda", 0)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.device, before = device, self.device
        yield
        self.device = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", fake.on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.calls.append(("synchronize", fake.device)))
    return fake


def test_an_arena_is_pinned_whole_and_once(cudart: Cudart) -> None:
    arena = HostArena(3 * PAGE - 1, GPU)
    first = arena.allocate(10)
    address = first.data_ptr()
    assert cudart.calls == [("register", address, 3 * PAGE, 0)] and arena.pinned_bytes == 3 * PAGE
    arena.close()
    arena.close()
    assert cudart.calls[1:] == [("synchronize", GPU), ("unregister", address)] and arena.pinned_bytes == 0


def test_an_arena_that_is_dropped_is_unpinned(cudart: Cudart) -> None:
    arena = HostArena(PAGE, GPU)
    address = arena.allocate(1).data_ptr()
    del arena
    gc.collect()
    deadline = time.monotonic() + 30
    while len(cudart.calls) < 3 and time.monotonic() < deadline:  # a thread of its own does it
        time.sleep(0.01)
    assert cudart.calls[1:] == [("synchronize", GPU), ("unregister", address)]


def test_nothing_is_pinned_unasked(cudart: Cudart) -> None:
    arena = HostArena(PAGE, pin_for=None)
    arena.close()
    assert cudart.calls == [] and arena.pinned_bytes == 0


def test_for_a_cpu_nothing_is_pinned_though_there_is_a_gpu(cudart: Cudart) -> None:
    assert HostArena(PAGE, torch.device("cpu")).pinned_bytes == 0
    assert cudart.calls == []


def test_pinning_that_fails_says_what_to_change(cudart: Cudart) -> None:
    cudart.code = 2
    with pytest.raises(BadInput, match=r"0\.50 GiB .* error 2; RLIMIT_MEMLOCK is .* offload\.pin to false"):
        HostArena(512 << 20, GPU)
    gc.collect()
    assert [call[0] for call in cudart.calls] == ["register"]


@pytest.mark.gpu
def test_pinned_memory_is_copied_from_and_to_a_device() -> None:
    arena = HostArena(32 << 20, devices.current("cuda"))
    data = arena.allocate(32 << 20).view(torch.float32)
    assert data.is_pinned() and arena.pinned_bytes == 32 << 20
    data.copy_(torch.randn(data.numel()))
    there = data.to("cuda", non_blocking=True)
    back = torch.empty_like(data)
    back.copy_(there)
    assert torch.equal(back, data)
    arena.close()
    assert not data.is_pinned() and torch.equal(back, data)


# -- the pool ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the arenas that pools have made."""
    sizes: list[int] = []

    class Counted(HostArena):
        def __init__(self, size_bytes: int, pin_for: torch.device | None) -> None:
            sizes.append(size_bytes)
            super().__init__(size_bytes, pin_for)

    monkeypatch.setattr(host_pool, "HostArena", Counted)
    return sizes


def test_buffers_come_back_and_are_lent_again(made: list[int]) -> None:
    pool = HostPool(pin_for=None)
    for _ in range(5):
        lent = [pool.borrow(size) for size in (3 * PAGE, PAGE, 3 * PAGE)]
        assert len(made) == 3
        del lent
    assert pool.total_bytes == 7 * PAGE


def test_the_smallest_buffer_that_is_large_enough_is_lent(made: list[int]) -> None:
    pool = HostPool(pin_for=None)
    lent = {size: pool.borrow(size * PAGE) for size in (8, 2, 4)}
    addresses = {size: address_of(buffer) for size, buffer in lent.items()}
    del lent
    assert address_of(pool.borrow(3 * PAGE)) == addresses[4]
    assert address_of(pool.borrow(5 * PAGE)) == addresses[8]
    assert address_of(pool.borrow(1)) == addresses[2]
    assert len(made) == 3


def test_batches_of_changing_lengths_end_in_a_pool_of_the_largest(made: list[int]) -> None:
    pool, choice = HostPool(pin_for=None), random.Random(0)
    for _ in range(300):
        length = choice.randint(1, 50)
        lent = [pool.borrow(length * PAGE) for _ in range(4)]
        assert pool.total_bytes <= 4 * 50 * PAGE
        del lent
    found = len(made)
    for length in range(50, 0, -1):
        lent = [pool.borrow(length * PAGE) for _ in range(4)]
        del lent
    assert len(made) <= found + 4 and pool.total_bytes <= 4 * 50 * PAGE


def test_what_is_lent_is_never_lent_twice() -> None:
    """Four threads that take, fill, check and return."""
    pool, failures = HostPool(pin_for=None), list[str]()

    def body(number: int) -> None:
        choice = random.Random(number)
        like = torch.empty(2 * PAGE, dtype=torch.uint8)
        for _ in range(200):
            buffer = pool.borrow(choice.randint(1, 4) * 2 * PAGE)
            memory = buffer.shaped(like).fill_(number)
            if set(memory.tolist()) != {number}:
                failures.append(f"thread {number}")
            del buffer, memory

    threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and pool.total_bytes <= 4 * 8 * PAGE


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(5, 7),
        torch.randn(5, 7).t(),
        torch.randn(2, 3, 4, dtype=torch.bfloat16).permute(2, 0, 1),
        torch.randn(3, 1, 5, dtype=torch.float64),
        torch.randn(()),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_a_buffer_takes_any_dense_shape(like: Tensor) -> None:
    found = HostPool(pin_for=None).borrow(like.nbytes).shaped(like)
    found.copy_(like)
    assert found.shape == like.shape and found.stride() == like.stride() and found.dtype == like.dtype
    assert torch.equal(found, like)


def address_of(buffer: HostBuffer) -> int:
    return buffer.shaped(torch.empty(1, dtype=torch.uint8)).data_ptr()
