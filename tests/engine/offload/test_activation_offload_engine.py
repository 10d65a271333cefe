"""Offloaded inputs under every plan, in compiled units, in Hugging Face models, and on a GPU."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, compile_units, engine_of
from terrazzo.engine.offload.activations import moved_tensors, offloaded_activations
from terrazzo.engine.offload.activations.host_pool import HostPool
from terrazzo.engine.offload.activations.moved_tensors import Copy, Route
from terrazzo.engine.runtime.device import Stream
from terrazzo.engine.unit_forwards.activation_checkpointing import offloading_of
from tests.engine.offload.moving import DEPTH, Block, Logged, Model, gradients, loss, once, same_bits, trains_alike
from tests.engine.toys import EVERY_PLAN, Net, adamw, batch, loss_of, mesh_for, on_ranks, sharded, train
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

compiles = (
    pytest.mark.filterwarnings(  # the compiler itself asks inputs for `.grad`, and uses what torch has deprecated
        "ignore:The .grad attribute of a Tensor:UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
    )
)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies and runs of blocks, in order."""
    monkeypatch.setattr(offloaded_activations, "Route", Logged)
    monkeypatch.setattr(Logged, "log", [], raising=False)
    return Logged.log


@pytest.fixture
def _everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_activations, "SMALLEST_BYTES", 1)


def offloaded_and_sharded(base: nn.Module, plan: str, world_size: int, **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(base)
    checkpoint_activations(model, offload=True, **{"mode": "full", **options})
    return tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, world_size))


def two_accumulated_steps(model: Any, optimizer: Any, rank: int) -> list[float]:
    losses = []
    for number in range(2):
        with tz.accumulate(model):
            for micro in range(2):
                losses.append(loss_of(model, batch(10 * number + micro, rank)))
                losses[-1].backward()
        losses.append(loss_of(model, batch(10 * number + 9, rank)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.item() for value in losses]


def moved_bytes(model: Any) -> int:
    (offloading,) = offloading_of(model)
    return sum(route.pool.total_bytes for route in offloading.routes.values())


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.usefixtures("_everything_moves")
@pytest.mark.parametrize("options", [{}, {"mode": "selective"}], ids=str)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_every_plan_trains_bit_for_bit_as_without(plan: str, options: dict[str, Any]) -> None:
    base = Net()

    def plain(rank: int) -> list[float]:
        model, optimizer = sharded(base, plan, 4)
        return train(model, optimizer, 2, rank) + two_accumulated_steps(model, optimizer, rank)

    def moving(rank: int) -> list[float]:
        model, optimizer = offloaded_and_sharded(base, plan, 4, **options)
        found = train(model, optimizer, 2, rank) + two_accumulated_steps(model, optimizer, rank)
        assert moved_bytes(model) > 0
        return found

    assert on_ranks(4, moving) == on_ranks(4, plain)


@pytest.mark.usefixtures("_everything_moves")
@compiles
@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_units_are_compiled_once_and_keep_their_inputs_alone(plan: str, mode: str, log: list[str]) -> None:
    torch._dynamo.reset()
    base, losses = Net(), {}
    for offload in (False, True):
        backend = CompileCounterWithBackend("aot_eager")
        model = copy.deepcopy(base)
        checkpoint_activations(model, mode, offload=offload)
        compile_units(model, backend=backend, fullgraph=True)
        with fake_group(1):
            model, optimizer = tz.shard(model, adamw(model.parameters()), plan)
            losses[offload] = train(model, optimizer, 2, 0)
            log.clear()
            with torch._dynamo.config.patch(error_on_recompile=True):
                losses[offload] += train(model, optimizer, 3, 0, first=2)
        assert 1 <= backend.frame_count <= len(base.blocks)
        assert log.count("out") == (3 * len(base.blocks) if offload else 0)
        assert all(unit.fills_gradually is unit.is_root for unit in engine_of(model).units)
    assert losses[True] == losses[False]
    torch._dynamo.reset()


@compiles
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "each block"])
def test_a_compiler_around_the_units_leaves_them_alone(whole: bool, log: list[str]) -> None:
    torch._dynamo.reset()

    def use(model: Any) -> None:
        if whole and model is not base:
            model = torch.compile(model, backend="aot_eager")
        elif model is not base:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        for number in range(3):
            loss(model, number).backward()

    base = Model()
    trains_alike(base, use)
    assert log.count("out") == 3 * DEPTH
    torch._dynamo.reset()


@pytest.mark.usefixtures("_everything_moves")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_hugging_face_layers_are_moved_as_they_are_called(name: str, log: list[str]) -> None:
    pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    from tests.engine.test_huggingface import build, tokens

    base, found = build(name), []
    model = copy.deepcopy(base)
    checkpoint_activations(model, "full", offload=True)
    for each in (base, model):
        each(input_ids=tokens(0, 0), labels=tokens(0, 0)).loss.backward()
        found.append(gradients(each))
    assert same_bits(*found)
    assert log.count("out") == 2


# -- streams, without and with a GPU -----------------------------------------------------------------------------------


class Queue:
    """Notes in one list what every stream is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told, self.device = name, told, torch.device("cuda", 0)

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.told.append(f"{self.name} records")
        return f"what {self.name} recorded"


@pytest.mark.usefixtures("_everything_moves")
@pytest.mark.parametrize("pin", [True, False])
def test_host_memory_is_pinned_as_the_settings_of_offload_say(pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that has run before, and without being warned that nothing is in host memory."""
    made: list[torch.device | None] = []

    class Noted(HostPool):
        def __init__(self, pin_for: torch.device | None) -> None:
            made.append(pin_for)
            super().__init__(pin_for)

    monkeypatch.setattr(moved_tensors, "HostPool", Noted)
    model = Net()
    checkpoint_activations(model, "full", offload=True)
    loss_of(model, batch()).backward()
    assert made == [torch.device("cpu")]
    with fake_group(1):
        model, _ = tz.shard(model, None, "zero3", offload=tz.Offload(pin=pin))
        loss_of(model, batch()).backward()
    assert made == [torch.device("cpu"), *([] if pin else [None])]


def test_copies_wait_for_the_computation_and_it_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    current = [Queue("compute", told)]

    @contextlib.contextmanager
    def use(stream: Queue) -> Iterator[None]:
        told.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queue("copies", told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "stream", use)
    route = Route(torch.device("cuda", 0), pin=True)
    source, target = torch.arange(5.0), torch.empty(5)
    move = route.copy(source, target)
    assert torch.equal(source, target)
    assert told == ["compute records", "copies waits for what compute recorded", "on copies", "copies records"]
    assert move.is_for_this_stream
    current[0] = Queue("another", told)
    assert not move.is_for_this_stream
    move.wait()
    assert told[4:] == ["compute waits for what copies recorded"]


def test_what_came_back_for_another_stream_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that runs on a stream of its own finds its input prefetched for the stream of the unit after it."""
    fetched: list[int] = []

    class Elsewhere(Copy):
        is_for_this_stream = False

        def wait(self) -> None: ...

    class Odd(Route):
        def copy(self, source: Tensor, target: Tensor) -> Any:
            fetched.append(source.numel())
            super().copy(source, target)
            return Elsewhere(Stream.current(self.device), None)

    monkeypatch.setattr(offloaded_activations, "Route", Odd)
    trains_alike(Model(), once)
    assert len(fetched) == DEPTH + DEPTH + (
        DEPTH - 1
    )  # out, back on demand, and each but the last prefetched for nothing


LARGE = 1024


def on_gpu(base: Model, checkpointing: Callable[[nn.Module], None]) -> tuple[list[Tensor | None], int]:
    """Gradients after three micro-batches of 16,384 rows, and the peak of bytes allocated beyond what was there."""
    gc.collect()  # a model that is checkpointed is part of a cycle
    there = torch.cuda.memory_allocated()  # gradients of those before
    model = copy.deepcopy(base)
    checkpointing(model)
    model.cuda()
    x = torch.randn(16 * LARGE, LARGE, generator=torch.Generator().manual_seed(0)).cuda()
    for number in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(x + number).square().mean().backward()
    torch.cuda.synchronize()
    return gradients(model), torch.cuda.max_memory_allocated() - there


@pytest.mark.gpu
def test_a_gpu_has_equal_bits_and_a_lower_peak() -> None:
    base = Model(width=LARGE)
    base.blocks.extend(Block(DEPTH + number, base.log, LARGE) for number in range(DEPTH))
    plain, _ = on_gpu(base, lambda model: None)
    kept, kept_bytes = on_gpu(base, lambda model: checkpoint_activations(model, "full", units=[Block]))
    found, found_bytes = on_gpu(base, lambda model: checkpoint_activations(model, "full", units=[Block], offload=True))
    assert same_bits(kept, plain) and same_bits(found, plain)
    assert kept_bytes - found_bytes >= (2 * DEPTH - 3) * 16 * LARGE * LARGE * 4  # all inputs but three


@pytest.mark.gpu
@pytest.mark.parametrize("slow", ["copies", "computation"])
def test_slow_copies_and_slow_computation_change_no_bit(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of clock cycles of delay on either stream, around everything that is copied."""

    class Delayed(Route):
        def copy(self, source: Tensor, target: Tensor) -> Any:
            with self.stream.inside() if slow == "copies" else contextlib.nullcontext():
                torch.cuda._sleep(20_000_000)
            return super().copy(source, target)

    base = Model(width=LARGE)
    plain, _ = on_gpu(base, lambda model: None)
    monkeypatch.setattr(offloaded_activations, "Route", Delayed)
    found, _ = on_gpu(base, lambda model: checkpoint_activations(model, "full", units=[Block], offload=True))
    assert same_bits(found, plain)
