"""Two real gloo processes: the same bits as the reference and as threads, whatever is late; losses as DDP's."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from terrazzo.engine import Precision
from terrazzo.engine.comm.host.gloo import GlooCollectives
from terrazzo.engine.schedule.backward import BackwardPass
from terrazzo.engine.schedule.schedule import Schedule
from tests.engine.models import base_model, batch, loss_of
from tests.engine.parity import Case, Runner, assert_parity, axes, run_on_threads
from tests.engine.reference import adamw, reference
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool

pytestmark = pytest.mark.processes

PLANS = (
    *(Case(plan, 2) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")),
    *(Case(plan, 1, replicas=2) for plan in ("hybrid_shard", "hfsdp")),
    *(Case(plan, 2, replicas=1) for plan in ("hybrid_shard_zero2", "hpz")),
)


def plan_id(case: Case) -> str:
    shape = f"{case.replicas}x{case.shards}" if case.replicas else f"{case.shards}"
    return f"{case.plan}-{shape}-{case.precision}"


def train(case: Case) -> Any:
    """Run by each process."""
    rank = torch.distributed.get_rank()
    return Runner(case, rank).run()


# -- bit for bit -----------------------------------------------------------------------------------------------


@pytest.mark.cover(case=axes, strength=1)  # pairs meet in test_parity, on ranks that are threads
@pytest.mark.parametrize("variant", ["tied", "unused"])
@pytest.mark.parametrize("case", mostly_long(PLANS, PLANS[3], PLANS[-1]), ids=plan_id)
def test_fp32_is_bitwise_the_single_process(two_processes: Pool, case: Case, variant: str) -> None:
    case = replace(case, variant=variant, micro_batches=2, steps=4)
    assert_parity(case, two_processes.run(train, case), reference(case.recipe))


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3"])
def test_reduced_precision_is_bitwise_the_casts_by_hand(two_processes: Pool, plan: str, precision: str) -> None:
    case = Case(plan, 2, variant="tied", precision=precision, micro_batches=2)
    assert_parity(case, two_processes.run(train, case), reference(case.recipe))


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("compiled", mostly_long([False, True], False))
@pytest.mark.parametrize("case", [Case("zero3", 2), Case("hybrid_shard", 1, replicas=2)], ids=plan_id)
def test_gradients_sent_in_4_bits_are_the_codes_by_hand(two_processes: Pool, case: Case, compiled: bool) -> None:
    dtypes = replace(Precision.named("bf16"), quantized_reduce="int4")
    case = replace(case, precision="bf16", dtypes=dtypes, micro_batches=2, compiled=compiled)
    assert_parity(case, two_processes.run(train, case), reference(case.recipe))


# -- DDP -------------------------------------------------------------------------------------------------------


def train_ddp(case: Case) -> list[list[float]]:
    """Losses by step and micro-batch under torch's DDP."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(copy.deepcopy(base_model(case.variant)), find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(case.steps):
        losses.append([])
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model, batch(step, rank, micro))
                loss.backward()  # type: ignore[no-untyped-call]
            losses[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module")
def losses_of_ddp(two_processes: Pool) -> Callable[[Case], torch.Tensor]:
    """Trained once for each of its cases, whatever their plan."""

    @cache
    def of(case: Case) -> torch.Tensor:
        return torch.tensor(two_processes.run(train_ddp, case), dtype=torch.float64)

    return lambda case: of(replace(case, plan="zero0", shards=2, replicas=None))


@pytest.mark.cover(strength=1, case=axes)
@pytest.mark.parametrize("trained", [("tied", 1), ("frozen", 3)], ids=str)
@pytest.mark.parametrize("case", mostly_long(PLANS, PLANS[1], PLANS[4]), ids=plan_id)
def test_losses_are_ddps(
    two_processes: Pool, losses_of_ddp: Callable[[Case], torch.Tensor], case: Case, trained: tuple[str, int]
) -> None:
    case = replace(case, variant=trained[0], micro_batches=trained[1], steps=5)
    wanted = losses_of_ddp(case)
    traces = [traces for traces, _ in two_processes.run(train, case)]
    found = torch.tensor([[trace.losses for trace in ranks] for ranks in traces], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# -- delays ----------------------------------------------------------------------------------------------------

POINTS: dict[str, tuple[type, str]] = {
    "after forward": (Schedule, "end_forward"),
    "before gather": (GlooCollectives, "_all_gather"),
    "before reduce": (GlooCollectives, "_reduce_scatter"),
    "before step": (Schedule, "end_backward"),
    "before backward of units": (BackwardPass, "enter"),
}


@contextlib.contextmanager
def late(kind: type, method: str, choose: random.Random) -> Iterator[None]:
    """Every call of the method first sleeps for up to 8 ms, on each rank for a time of its own."""
    original: Callable[..., Any] = getattr(kind, method)

    def delayed(*args: Any, **options: Any) -> Any:
        time.sleep(choose.choice([0.0, 0.0, 0.002, 0.008]))
        return original(*args, **options)

    setattr(kind, method, delayed)
    try:
        yield
    finally:
        setattr(kind, method, original)


def train_late(case: Case, points: list[str]) -> Any:
    rank = torch.distributed.get_rank()
    choose = random.Random(f"{rank} {points}")
    with contextlib.ExitStack() as stack:
        for point in points:
            stack.enter_context(late(*POINTS[point], choose))
        return Runner(case, rank).run()


EACH = [[point] for point in POINTS] + [list(POINTS)]


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("points", mostly_long(EACH, EACH[-1]), ids=" + ".join)
@pytest.mark.parametrize("plan", mostly_long(["zero3", "shard_grad_op"], "zero3"))
def test_delays_change_no_bit(two_processes: Pool, plan: str, points: list[str]) -> None:
    case = Case(plan, 2, variant="unused", micro_batches=2, steps=4)
    assert_parity(case, two_processes.run(train_late, case, points), reference(case.recipe))


@pytest.mark.parametrize("plan", mostly_long(["zero3", "zero1", "shard_grad_op"], "zero3"))
def test_an_optimizer_step_that_is_late_on_one_rank_changes_no_bit(two_processes: Pool, plan: str) -> None:
    case = Case(plan, 2)
    assert_parity(case, two_processes.run(train_stepping_late, case), reference(case.recipe))


def train_stepping_late(case: Case) -> Any:
    rank = torch.distributed.get_rank()
    return Runner(case, rank, tune=lambda model, optimizer: time.sleep(0.02 * rank)).run()


# -- compiled --------------------------------------------------------------------------------------------------


def train_compiled(case: Case) -> Any:
    """Fails where dynamo would give up and run eagerly."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        result = train(case)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return result


IN_BF16 = Case("zero3", 2, precision="bf16")


@pytest.mark.cover(strength=1, case=lambda case: {"mesh": case.replicas, "precision": case.precision})
@pytest.mark.parametrize("case", mostly_long([*PLANS, IN_BF16], PLANS[-1], IN_BF16), ids=plan_id)
def test_compiled_units_change_no_bit(two_processes: Pool, case: Case) -> None:
    """Weights tied inside a unit are left out: a compiled unit adds up its own uses of a weight before all others."""
    case = replace(case, compiled=True, variant="tied_across")
    assert_parity(case, two_processes.run(train_compiled, case, timeout_s=120.0), reference(case.recipe))


ALONE = (Case("zero3", 1), Case("zero0", 1), Case("hpz", 1, replicas=1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("case", mostly_long(ALONE, ALONE[0]), ids=plan_id)
def test_compiled_units_on_one_rank(case: Case) -> None:
    case = replace(case, compiled=True, checkpointing="full", micro_batches=2)
    assert_parity(case, run_on_threads(case), reference(case.recipe))
