"""The drop-in on two gloo ranks, held against Accelerate's own class on plain DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.processes import Pool
from tests.integrations.accelerating import Block, Loop, distance, fresh_state, loader, small_model, train

pytest.importorskip("accelerate")

pytestmark = pytest.mark.processes
PLANS = ("zero0", "zero1", "zero2", "zero3")


def _classes() -> tuple[Any, Any]:
    import accelerate

    from terrazzo.integrations.accelerate import Accelerator

    return accelerate.Accelerator, Accelerator


def _distances(accumulation: int, clip: float | None, plans: Sequence[str], epochs: int = 2) -> dict[str, float]:
    theirs, ours = _classes()
    reference = train(theirs, clip, epochs, gradient_accumulation_steps=accumulation)
    found = {}
    for plan in plans:
        result = train(ours, clip, epochs, gradient_accumulation_steps=accumulation, plan=plan)
        found[plan] = distance(reference, result) if result[1] else 0.0  # rank 0 has the weights
    return found


def test_every_plan_trains_as_ddp_to_the_bit(two_processes: Pool) -> None:
    assert two_processes.run(_distances, 1, None, PLANS, 1)[0] == dict.fromkeys(PLANS, 0.0)


def test_accumulation_trains_as_ddp(two_processes: Pool) -> None:
    (found, _) = two_processes.run(_distances, 3, None, ("zero1", "zero3"))  # of the last step only two micro-batches
    assert found["zero1"] == 0.0  # it sums on the rank first, as no_sync does
    assert found["zero3"] < 1e-6  # it reduces each micro-batch: another order of one sum


def test_clipping_trains_as_ddp(two_processes: Pool) -> None:
    assert (
        max(two_processes.run(_distances, 4, 0.5, ("zero3",))[0].values()) < 1e-6
    )  # the norm is summed in another order


def _clipped_by_value() -> list[float]:
    theirs, ours = _classes()
    reference = train(theirs, None, 1, 1e-3)
    results = [train(ours, None, 1, 1e-3, plan=plan) for plan in ("zero1", "zero3")]
    assert distance(reference, train(theirs, None, 1)) > 1e-4 or not reference[1]  # it clips
    return [distance(reference, result) for result in results if result[1]]


def test_clipping_by_value_trains_as_ddp_to_the_bit(two_processes: Pool) -> None:
    assert two_processes.run(_clipped_by_value)[0] == [0.0, 0.0]


def _autocast_and_split_batches() -> list[float]:
    from accelerate import DataLoaderConfiguration

    theirs, ours = _classes()
    both: list[dict[str, Any]] = [
        {"mixed_precision": "bf16"},
        {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True), "step_scheduler_with_optimizer": False},
    ]
    found = []
    for arguments in both:
        reference, result = train(theirs, None, 1, **arguments), train(ours, None, 1, plan="zero3", **arguments)
        found.append(distance(reference, result) if result[1] else 0.0)
    return found


def test_autocast_and_batches_and_schedules_are_accelerates(two_processes: Pool) -> None:
    assert two_processes.run(_autocast_and_split_batches)[0] == [0.0, 0.0, 0.0]


def _fp16() -> tuple[float, int, bool]:
    """What the drop-in asks for under fp16, in autocast by hand: on a CPU Accelerate itself does not enter it."""
    import terrazzo as tz
    from terrazzo.integrations.accelerate.requested import RequestedSetup
    from terrazzo.integrations.shared.arguments import TerrazzoArguments

    precision = (
        RequestedSetup({"mixed_precision": "fp16"}, TerrazzoArguments(), False).setup(torch.device("cuda"), 1).precision
    )
    model, plain = small_model(), small_model()
    optimizer, its = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (model, plain))
    model, optimizer = tz.shard(model, optimizer, "zero2", precision=precision)
    scaler, worst = torch.amp.GradScaler("cpu"), 0.0
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        x = torch.randn(8, 16, generator=generator) * (300.0 if step == 12 else 1.0)
        losses = []
        for each in (model, plain):
            with torch.autocast("cpu", torch.float16):
                output = each(x)
            losses.append(output.float().square().mean())
        losses[0].backward()
        scaler.scale(losses[1]).backward()
        optimizer.step()
        scaler.step(its)
        scaler.update()
        optimizer.zero_grad()
        its.zero_grad()
        worst = max(worst, abs(float(losses[0] - losses[1])))
    return worst, optimizer.skipped_steps, optimizer.loss_scale == scaler.get_scale()


def test_fp16_scales_as_torchs_own_scaler(two_processes: Pool) -> None:
    worst, skipped, same_scale = two_processes.run(_fp16)[0]
    assert worst == 0.0
    assert skipped > 0
    assert same_scale


def _truth() -> None:
    from accelerate.utils import DistributedType

    fresh_state()
    _, ours = _classes()
    accelerator = ours(cpu=True, plan="zero3", units=[Block])
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, wrapped, data = accelerator.prepare(model, optimizer, loader())
    assert prepared is model
    assert accelerator.unwrap_model(prepared) is model
    assert wrapped.optimizer is optimizer
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    assert (accelerator.num_processes, accelerator.mixed_precision) == (2, "no")
    assert model._terrazzo.plan.name == "zero3"
    assert len(model._terrazzo.units) == 4
    assert accelerator.prepare(model, optimizer)[0] is model  # once more changes nothing
    whole = small_model()
    assert accelerator.prepare_model(whole, evaluation_mode=True) is whole
    assert not hasattr(whole, "_terrazzo")
    seen = [len(accelerator.gather_for_metrics(y)) for _, y in data]
    assert sum(seen) == 60  # without the samples that fill the last batch
    alone = accelerator.prepare(small_model())  # a model without an optimizer
    assert alone(torch.ones(2, 16)).shape == (2, 1)
    later = accelerator.prepare(torch.optim.SGD(alone.parameters(), lr=0.1))
    accelerator.backward(alone(torch.ones(2, 16)).sum())
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)  # by torch's own function: not without effect
    assert norm > 0.5
    assert float(accelerator.clip_grad_norm_(alone.parameters(), 1.0)) == pytest.approx(0.5, rel=1e-5)
    before = alone(torch.ones(2, 16)).sum()
    later.step()
    assert alone(torch.ones(2, 16)).sum() < before
    assert accelerator.free_memory() == []


def test_what_code_branches_on_is_true(two_processes: Pool) -> None:
    two_processes.run(_truth)


WAYS: dict[str, Callable[[Loop], AbstractContextManager[Any]]] = {
    "accelerator": lambda loop: loop.accelerator.no_sync(loop.model),
    "model": lambda loop: loop.model.no_sync(),
    "a module of nobody": lambda loop: loop.accelerator.no_sync(nn.Linear(2, 2)),  # not prepared
}


def _sync_in_each_batch(way: str) -> tuple[float, ...]:
    """Accumulation as scripts write it without `accumulate`, and with `no_sync` by hand."""
    theirs, ours = _classes()
    found = []
    for make in (theirs, partial(ours, plan="zero2"), partial(ours, plan="zero1")):
        fresh_state()
        loop = Loop(make(cpu=True))
        for index, (x, y) in enumerate(loop.data):
            with WAYS[way](loop) if index % 4 == 1 else torch.enable_grad():
                loop.accelerator.backward(nn.functional.mse_loss(loop.model(x), y) / 2)
            if index % 2 == 0:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        found.append((loop.losses, loop.weights(), loop.scheduler.get_last_lr()))
    if not found[1][1]:
        return ()
    return tuple(distance(found[0], other) for other in found[1:])


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_by_hand(way: str, two_processes: Pool) -> None:
    assert max(two_processes.run(_sync_in_each_batch, way)[0]) < 1e-6


def _two_forwards_first() -> float:
    """Two forwards under `no_sync`, and `trigger_sync_in_backward` around the second backward."""
    theirs, ours = _classes()
    found = []
    for make in (theirs, partial(ours, plan="zero1")):
        fresh_state()
        loop = Loop(make(cpu=True))
        for x, y in loop.data:
            with loop.accelerator.no_sync(loop.model):
                first, second = (nn.functional.mse_loss(loop.model(part), y) / 2 for part in (x, x.flip(1)))
            loop.accelerator.backward(first)
            with loop.accelerator.trigger_sync_in_backward(loop.model):
                loop.accelerator.backward(second)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        found.append((loop.losses, loop.weights(), loop.scheduler.get_last_lr()))
    return distance(*found) if found[1][1] else 0.0


def test_forwards_before_their_backwards(two_processes: Pool) -> None:
    assert two_processes.run(_two_forwards_first)[0] < 1e-6


def _two_models_accumulate() -> float:
    """As adversarial scripts do: `accumulate` takes both models, and each has an optimizer."""
    theirs, ours = _classes()
    found = []
    for make, words in ((theirs, {}), (ours, {"plan": "zero1"})):
        fresh_state()
        one = Loop(make(cpu=True, gradient_accumulation_steps=2, **words))
        other = Loop(one.accelerator)
        for x, y in one.data:
            with one.accelerator.accumulate(one.model, other.model):
                loss = nn.functional.mse_loss(other.model(x) + one.model(x), y)
                one.accelerator.backward(loss)
                for each in (one, other):
                    each.optimizer.step()
                    each.optimizer.zero_grad()
        found.append(([], one.weights() | {f"other.{name}": values for name, values in other.weights().items()}, []))
    return distance(*found) if found[1][1] else 0.0


def test_two_models_accumulate_together(two_processes: Pool) -> None:
    assert two_processes.run(_two_models_accumulate)[0] < 1e-6


def _as_deepspeed_says() -> float:
    """Accumulation and clipping come from DeepSpeed's settings, and the script says neither."""
    from accelerate.utils import patch_environment

    theirs, ours = _classes()
    reference = train(theirs, 0.5, gradient_accumulation_steps=2)
    told = {"use_deepspeed": "true", "deepspeed_zero_stage": "1", "gradient_clipping": "0.5"}
    told["gradient_accumulation_steps"] = "2"
    with patch_environment(**{f"accelerate_{name}": value for name, value in told.items()}):
        result = train(ours)
    return max((float((reference[1][name] - values).abs().max()) for name, values in result[1].items()), default=0.0)


def test_settings_of_deepspeed_clip_and_accumulate(two_processes: Pool) -> None:
    assert two_processes.run(_as_deepspeed_says)[0] < 1e-6


def _weights_out(folder: str) -> None:
    from accelerate import load_checkpoint_in_model

    fresh_state()
    _, ours = _classes()
    loop = Loop(ours(cpu=True, plan="zero3", precision="bf16"))
    loop.epoch()
    full = loop.accelerator.get_state_dict(loop.model)
    loop.accelerator.save_model(loop.model, folder, max_shard_size="4KB")
    loop.accelerator.wait_for_everyone()
    assert bool(full) is loop.accelerator.is_main_process
    if full:
        assert {values.dtype for values in full.values()} == {torch.float32}  # the masters
        again = small_model()
        load_checkpoint_in_model(again, folder)
        for name, values in again.state_dict().items():
            assert torch.equal(values, full[name]), name
        assert len(list(Path(folder).glob("*.safetensors"))) > 1


def test_weights_come_out_whole_in_master_precision(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(_weights_out, str(tmp_path))


def _refusals() -> dict[str, str]:
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import DataLoaderConfiguration

    fresh_state()
    _, ours = _classes()
    accelerator = ours(cpu=True, plan="zero3")
    loop = Loop(accelerator)
    model, parameters = loop.model, list(loop.model.parameters())
    other = small_model()
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: dict[str, Any] = {
        "late": lambda: accelerator.prepare(late),
        "foreign": lambda: accelerator.prepare_optimizer(torch.optim.SGD(other.parameters())),
        "two": lambda: accelerator.prepare(other, *(torch.optim.SGD(other.parameters()) for _ in range(2))),
        "part": lambda: accelerator.clip_grad_norm_(parameters[:3], 1.0),
        "join": lambda: accelerator.join_uneven_inputs([model]).__enter__(),
        "local": lambda: LocalSGD(accelerator, model, 8),
        "compiled": lambda: accelerator.prepare(torch.compile(other)),
        "keyword": lambda: accelerator.save_state("nowhere", exclude_frozen_parameters=True),
        "uneven": lambda: ours(cpu=True, plan="zero3", dataloader_config=DataLoaderConfiguration(even_batches=False)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=False) as local:
        local.step()
    return found


def test_what_cannot_be_honoured_is_refused(two_processes: Pool) -> None:
    one, other = two_processes.run(_refusals)
    assert one == other
    expected = {
        "late": "is a second optimizer of one Sequential",
        "foreign": "parameters of 0 prepared models",
        "two": "is a second optimizer",
        "part": "3 parameters were given to be clipped",
        "join": "join_uneven_inputs cannot work",
        "local": "every 8 steps; ranks of a sharded model step together",
        "compiled": "dynamo_backend='inductor'",
        "keyword": "exclude_frozen_parameters",
        "uneven": "Plan zero3 splits weights, and even_batches=False",
    }
    for name, words in expected.items():
        assert words in one[name], one.get(name)
        assert one[name].startswith(("BadInput", "Misuse"))
