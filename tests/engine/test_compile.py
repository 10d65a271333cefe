"""Units compiled one by one: 20 steps without a second compilation, and the numbers of eager mode."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, compile_units, engine_of
from tests.engine.toys import Net, adamw, batch, loss_of, sharded, train, unpickled, without_collector
from tests.helpers.cover import mostly_long
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

# torch: the compiler itself asks inputs for `.grad`, and uses what it has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(base: Net, plan: str, backend: Any, checkpointing: str = "none", **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(base)
    checkpoint_activations(model, checkpointing)
    compile_units(model, backend=backend, fullgraph=True)
    return tz.shard(model, adamw(model.parameters()), plan, **options)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_twenty_steps_compile_each_unit_once(plan: str, checkpointing: str) -> None:
    """On a simulated group of 4, so that weights are really gathered and released around the compiled code."""
    backend = CompileCounterWithBackend("aot_eager")
    base = Net()
    with fake_group(4):
        model, optimizer = compiled(base, plan, backend, checkpointing)
        for step in range(2):
            train(model, optimizer, 1, 0, first=step)
        frames = backend.frame_count
        assert 1 <= frames <= len(base.blocks)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(2, 20):
                train(model, optimizer, 1, 0, first=step)
    assert backend.frame_count == frames


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_trains_as_without_compilation(precision: str) -> None:
    base = Net()
    with fake_group(1):
        eager = train(*sharded(base, "zero3", 1, precision=precision), 5, 0)
        found = train(*compiled(base, "zero3", "aot_eager", precision=precision), 5, 0)
    assert found == pytest.approx(eager, abs=1e-5 if precision == "fp32" else 2e-2)


def test_a_compiler_that_looks_at_data_has_not_written_into_it() -> None:
    """Else master weights would be compared with the weights from then on."""
    with fake_group(1):
        model, optimizer = compiled(Net(), "zero2", "aot_eager", precision="bf16")
        train(model, optimizer, 2, 0)
        buckets = [bucket for unit in engine_of(model).units for bucket in unit.buckets]
        assert all(
            bucket.spec.resident and bucket.spec.has_own_master and not bucket.full.edits.data_taken
            for bucket in buckets
        )
        assert model.head.weight.data.norm() > 0
        assert any(bucket.full.edits.data_taken for bucket in buckets)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.weight.data.norm()


def test_a_compiled_forward_may_read_data() -> None:
    with fake_group(1):
        model = nn.Sequential(Reading())
        compile_units(model, backend="aot_eager", fullgraph=True, units=[Reading])
        model, _ = tz.shard(model, None, "zero2", units=[Reading], precision="bf16")
        x = torch.randn(2, 4)
        with torch.no_grad():
            inner = model[0].inner
            wanted = (x.bfloat16() @ inner.weight.T + inner.bias) * inner.weight.norm()
        torch.testing.assert_close(model(x), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_deep_copy_computes_with_its_own_weights(checkpointing: str) -> None:
    backend = CompileCounterWithBackend("eager")
    original, alone = Net(), Net()
    checkpoint_activations(original, checkpointing)
    compile_units(original, backend=backend, fullgraph=True)
    loss_of(original, batch()).backward()
    twin = copy.deepcopy(original)
    twin.load_state_dict(alone.state_dict())
    torch.testing.assert_close(loss_of(twin, batch()), loss_of(alone, batch()))
    assert backend.frame_count == 1
    with fake_group(1):
        tz.shard(twin, None, "zero0")
    assert all(unit.compiled is not unit.is_root for unit in engine_of(twin).units)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_deleted_model_is_freed_at_once(checkpointing: str, shards: bool) -> None:
    model: Any = Net()
    checkpoint_activations(model, checkpointing)
    compile_units(model, backend="eager", fullgraph=True)
    model = unpickled(model)
    with fake_group(1):
        if shards:
            model, _ = tz.shard(model, None, "zero3")
        gone = [weakref.ref(model), weakref.ref(model.blocks[0])]
        loss_of(model, batch()).backward()
        with without_collector():
            del model
            assert [each() for each in gone] == [None, None]


def test_evaluation_and_training_take_turns() -> None:
    base = Net()
    with fake_group(1):
        model, optimizer = compiled(base, "zero3", "aot_eager")
        plain, plain_optimizer = sharded(base, "zero3", 1)
        for step in range(3):
            with torch.no_grad():
                found, wanted = loss_of(model, batch(9)).item(), loss_of(plain, batch(9)).item()
            assert found == pytest.approx(wanted, abs=1e-5)
            train(model, optimizer, 1, 0, first=step)
            train(plain, plain_optimizer, 1, 0, first=step)


@pytest.mark.parametrize("plan", mostly_long(["zero0", "zero3"], "zero3"))
def test_compiling_while_there_are_gradients(plan: str) -> None:
    base = Net()
    with fake_group(1):
        losses = []
        for model, optimizer in (compiled(base, plan, "aot_eager"), sharded(base, plan, 1)):
            loss_of(model, batch(0)).backward()
            loss_of(model, batch(1)[:, :4]).backward()
            with torch.no_grad():
                loss_of(model, batch(1)[:1])
            assert model.head.weight.grad is not None
            optimizer.step()
            losses.append(loss_of(model, batch(2)).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def _on_gloo() -> tuple[list[float], list[float], int, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    base, rank = Net(), dist.get_rank()
    eager = train(*sharded(base, "zero3"), 20, rank)
    backend = CompileCounterWithBackend("aot_eager")
    model, optimizer = compiled(base, "zero3", backend)
    found = train(model, optimizer, 2, rank)
    frames = backend.frame_count
    found += train(model, optimizer, 18, rank, first=2)
    return found, eager, frames, backend.frame_count


@pytest.mark.long
@pytest.mark.processes
def test_two_ranks_train_as_without_compilation(two_processes: Pool) -> None:
    for found, eager, early, late in two_processes.run(_on_gloo, timeout_s=120.0):
        assert found == pytest.approx(eager, abs=1e-4)
        assert early == late >= 1
