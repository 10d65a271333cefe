"""The engine on two gloo ranks, against a plain loop in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import terrazzo as tz
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations import deepspeed
from tests.helpers.processes import Pool
from tests.integrations import killed

pytestmark = pytest.mark.processes

STEPS, MICRO = 4, 4
STATE = {"step": 7, "deepspeed": "mine"}  # names that the checkpoint uses itself
ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
WARM = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.002, "warmup_max_lr": 0.02, "warmup_num_steps": 3}}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(MICRO, 8, generator=generator), torch.randn(MICRO, 4, generator=generator)) for _ in range(count)
    ]


def config(stage: int, accumulation: int = 1, clip: float = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": ADAMW,
        "scheduler": WARM,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **more,
    }


def plain(accumulation: int, clip: float) -> dict[str, list[float]]:
    """The oracle: both ranks' losses, averaged, in one process; DeepSpeed's AdamW and warm-up, by hand."""
    copies = [model(), model()]
    one, other = copies
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.002, weight_decay=0.1)
    data = [batches(rank, STEPS * accumulation) for rank in (0, 1)]
    found: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank, copy in enumerate(copies):
                inputs, targets = data[rank][step * accumulation + micro]
                loss = nn.functional.mse_loss(copy(inputs), targets)
                if rank == 0:
                    found["losses"].append(loss.item())
                (loss / accumulation / 2).backward()
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            mine.grad += theirs.grad
        found["norms"].append(torch.nn.utils.clip_grad_norm_(one.parameters(), clip or math.inf).item())
        optimizer.step()
        warm = math.log(step + 1) / math.log(3) if step < 3 else 1.0
        optimizer.param_groups[0]["lr"] = 0.002 + 0.018 * warm
        found["rates"].append(optimizer.param_groups[0]["lr"])
        with torch.no_grad():
            for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
                theirs.copy_(mine)
                mine.grad = theirs.grad = None
    return found


def trained(stage: int, accumulation: int, clip: float, device: str = "none") -> dict[str, Any]:
    document = config(stage, accumulation, clip)
    document["zero_optimization"]["offload_optimizer"] = {"device": device}
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model(), config=document)
    assert (loader, schedule) == (None, engine.lr_scheduler)
    assert optimizer is engine.optimizer
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "boundaries": []}
    for inputs, targets in batches(engine.global_rank, STEPS * accumulation):
        loss = nn.functional.mse_loss(engine(inputs), targets)
        found["losses"].append(loss.item())
        found["boundaries"].append(engine.is_gradient_accumulation_boundary())
        returned = engine.backward(loss)
        assert math.isclose(returned.item(), loss.item() / accumulation, rel_tol=1e-6)
        engine.step()
        if found["boundaries"][-1]:
            found["norms"].append(engine.get_global_grad_norm())
            found["rates"].append(engine.get_lr()[0])
    found["counts"] = engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps
    return found


CASES = [(stage, accumulation, clip) for stage in range(4) for accumulation, clip in ((1, 0.5), (4, 0.5), (2, 0.0))]


def matrix() -> list[tuple[Any, dict[str, Any]]]:
    offloaded = [((stage, 2, clip), trained(stage, 2, clip, "cpu")) for stage, clip in ((2, 0.5), (3, 0.0))]
    return [*((case, trained(*case)) for case in CASES), *offloaded]


def test_losses_norms_and_rates_are_the_plain_loops(two_processes: Pool) -> None:
    for (stage, accumulation, clip), found in two_processes.run(matrix)[0]:
        expected = plain(accumulation, clip)
        for name in ("losses", "norms", "rates"):
            assert found[name] == pytest.approx(expected[name], rel=2e-6), (stage, accumulation, clip, name)
        assert found["boundaries"] == [(index + 1) % accumulation == 0 for index in range(STEPS * accumulation)]
        assert found["counts"] == (STEPS * accumulation, STEPS, STEPS * accumulation * MICRO * 2, 0)


def said() -> list[str]:
    """Two steps of two micro-batches, the last of which is said or counted, in four ways."""
    results = []
    for way in ("counted", "said", "no_sync", "set_train_batch_size"):
        accumulation = 2 if way == "counted" else 1
        engine = deepspeed.initialize(model=model(), config=config(1, accumulation))[0]
        if way == "set_train_batch_size":
            engine.set_train_batch_size(2 * 2 * MICRO)
        for index, (inputs, targets) in enumerate(batches(engine.global_rank, 4)):
            last = index % 2 == 1
            loss = nn.functional.mse_loss(engine(inputs), targets) / (2 if way in ("said", "no_sync") else 1)
            if way == "said":
                engine.set_gradient_accumulation_boundary(last)
            if way == "no_sync" and not last:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
                engine.step()
        with tz.gathered(engine.module) as parameters:
            results.append(f"{engine.global_steps} {parameters['0.weight'].double().sum().item():.12f}")
    return results


def test_the_boundary_can_be_counted_or_said(two_processes: Pool) -> None:
    results = two_processes.run(said)[0]
    assert results[0].startswith("2 ")
    assert set(results) == {results[0]}


def sixteen_bits() -> dict[str, Any]:
    """A step whose gradient is not finite is left out, on all ranks; the schedule waits, counts go on."""
    built = nn.Sequential(*[each for each in model() if not isinstance(each, nn.BatchNorm1d)])
    built.register_buffer("mean", torch.ones(1))
    engine = deepspeed.initialize(model=built, config=config(2, bf16={"enabled": True}))[0]
    (inputs, targets), _ = batches(engine.global_rank, 2)
    rates, applied = [engine.get_lr()[0]], []
    for scale in (1.0, float("inf") if engine.global_rank == 1 else 1.0, 1.0):
        output = engine(inputs.bfloat16())
        assert output.dtype is torch.bfloat16
        engine.backward(nn.functional.mse_loss(output.float(), targets) * scale)
        engine.step()
        rates.append(engine.get_lr()[0])
        applied.append(engine.was_step_applied())
    with tz.gathered(built) as parameters:
        finite = all(bool(values.isfinite().all()) for values in parameters.values())
    buffers = {str(buffer.dtype) for buffer in built.buffers()}
    counts = engine.skipped_steps, engine.global_steps
    return {"rates": rates, "applied": applied, "finite": finite, "buffers": buffers, "counts": counts}


def scaled() -> tuple[list[bool], list[float], int]:
    """fp16 from a loss scale that overflows."""
    built = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    engine = deepspeed.initialize(model=built, config=config(1, fp16=fp16, steps_per_print=math.inf))[0]
    applied, scales = [], [engine.loss_scale()]
    for inputs, targets in batches(engine.global_rank, 20):
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
        applied.append(engine.was_step_applied())
        scales.append(engine.loss_scale())
    return applied, scales, engine.skipped_steps


def test_fp16_halves_its_scale_until_steps_are_applied(two_processes: Pool) -> None:
    for applied, scales, skipped in two_processes.run(scaled):
        assert applied[0] is False
        assert applied[-1] is True
        assert skipped == applied.count(False)
        assert scales[-1] == 2.0 ** (24 - skipped)


def test_bf16_leaves_out_steps_that_are_not_finite(two_processes: Pool) -> None:
    for found in two_processes.run(sixteen_bits):
        assert found["applied"] == [True, False, True]
        assert found["rates"][1] == found["rates"][2] != found["rates"][3]
        assert (found["finite"], found["counts"]) == (True, (1, 3))
        assert found["buffers"] == {"torch.float32"}  # DeepSpeed casts parameters alone


def resumed(folder: str) -> dict[str, Any]:
    """Saved by stage 3 after two steps; continued by stages 3 and 1, and as weights alone."""
    first = deepspeed.initialize(model=model(), config=config(3))[0]
    data = batches(first.global_rank, 6)

    def go_on(engine: Any, start: int) -> list[float]:
        losses = []
        for inputs, targets in data[start:]:
            loss = nn.functional.mse_loss(engine(inputs), targets)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses

    for inputs, targets in data[:2]:
        first.backward(nn.functional.mse_loss(first(inputs), targets))
        first.step()
    assert first.load_checkpoint(folder) == (None, None)
    for _ in range(2):  # the second replaces the first
        first.save_checkpoint(folder, client_state=STATE)
    with pytest.raises(BadInput, match="tensor'] is a Tensor; give its item"):  # and this leaves it as it is
        first.save_checkpoint(folder, client_state={"tensor": torch.ones(1)})
    first.save_checkpoint(f"{folder}/others", tag=f"rank {first.global_rank}", save_latest=False)
    full = {
        **{name: value.clone() for name, value in _gathered(first).items()},
        **{name: buffer.clone() for name, buffer in first.module.named_buffers()},
    }
    assert first.save_16bit_model(folder, "model.safetensors")
    assert first.save_16bit_model(folder)
    found: dict[str, Any] = {"full": full, "uninterrupted": go_on(first, 2)}
    for stage in (3, 1):
        killed.between_renames(Path(folder) / "global_step2")
        engine = deepspeed.initialize(model=model(), config=config(stage))[0]
        path, state = engine.load_checkpoint(folder)
        assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (2, 2 * MICRO * 2, 2)
        found[f"stage {stage}"] = Path(str(path)).name, state, go_on(engine, 2)
    weights = deepspeed.initialize(model=model(), config=config(2))[0]
    tag = "global_step2" if first.global_rank == 0 else "of_no_save"  # the first rank's counts
    _, state = weights.load_checkpoint(folder, tag=tag, load_module_only=True)
    found["weights"] = weights.global_steps, state, go_on(weights, 2)[0]
    return found


def _gathered(engine: Any) -> dict[str, Tensor]:
    with tz.gathered(engine.module) as parameters:
        return {name: value.detach().clone() for name, value in parameters.items()}


def test_checkpoints_go_on_under_another_stage(two_processes: Pool, tmp_path: Path) -> None:
    found = two_processes.run(resumed, str(tmp_path))[0]
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert found["stage 3"] == ("global_step2", STATE, found["uninterrupted"])
    assert found["stage 1"][2] == pytest.approx(found["uninterrupted"], rel=1e-6)
    assert found["weights"] == (0, STATE, found["uninterrupted"][0])
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        *("global_step2", "latest", "model.safetensors", "others", "pytorch_model.bin")
    ]
    assert [each.name for each in (tmp_path / "others").iterdir()] == ["rank 0"]
    for state in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "pytorch_model.bin")):
        copy = model()
        copy.load_state_dict(state)
        assert all(torch.equal(value, found["full"][name]) for name, value in copy.state_dict().items())


def taken_over(folder: str) -> tuple[Any, ...]:
    """The next loss, rate, counts and state from a checkpoint in DeepSpeed's format."""
    engine = deepspeed.initialize(model=model(), config=config(2))[0]
    _, state = engine.load_checkpoint(folder)
    before = engine.global_steps, engine.global_samples
    inputs, targets = batches(engine.global_rank, 1)[0]
    for _ in range(2):
        loss = nn.functional.mse_loss(engine.eval()(inputs), targets)
        engine.backward(loss)
        engine.step()
    return loss.item(), engine.get_lr()[0], before, state


def test_checkpoints_of_deepspeed_are_taken_over(two_processes: Pool, tmp_path: Path) -> None:
    copy = model().eval()
    optimizer = torch.optim.AdamW(copy.parameters(), lr=0.02, weight_decay=0.1)
    (inputs, targets), (others, aims) = batches(0, 1)[0], batches(1, 1)[0]

    def step() -> float:
        loss = nn.functional.mse_loss(copy(inputs), targets)
        optimizer.zero_grad()
        ((loss + nn.functional.mse_loss(copy(others), aims)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(copy.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    step()
    (tmp_path / "latest").write_text("three")
    (tmp_path / "three").mkdir()
    state = {
        "module": copy.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": {"last_batch_iteration": 5},
    }
    state |= {"global_steps": 3, "global_samples": 24, "skipped_steps": 0, "dp_world_size": 2, "mp_world_size": 1}
    state |= {
        "ds_version": "0.19.8",
        "ds_config": {},
        "buffer_names": [name for name, _ in copy.named_buffers()],
        "param_shapes": None,
        "epoch": 7,
    }
    torch.save(state, tmp_path / "three" / "mp_rank_00_model_states.pt")
    step()
    expected = step()
    first, second = two_processes.run(taken_over, str(tmp_path))
    assert first[0] == pytest.approx(expected, rel=1e-6)
    assert first[1] == second[1] == pytest.approx(0.02)
    assert first[2:] == second[2:] == ((3, 24), {"epoch": 7})


def refused() -> list[str]:
    engine = deepspeed.initialize(model=model(), config=config(3, accumulation=2))[0]
    inputs, targets = batches(engine.global_rank, 1)[0]
    without = deepspeed.initialize(model=model(), config={"train_batch_size": 8})[0]
    loss = nn.functional.mse_loss(engine(inputs), targets)
    lamb, whole = {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "bf16": {"enabled": True}}, model()
    attempts: list[tuple[type[Exception], Any]] = [
        (Misuse, loss.backward),
        (Misuse, lambda: without.backward(loss)),
        (Misuse, lambda: [engine.step() for _ in range(2)]),
        (AttributeError, lambda: engine.offload_states),
        (BadInput, lambda: engine.set_train_batch_size(9)),
        (BadInput, lambda: engine.load_checkpoint("x", load_module_strict=False)),
        (BadInput, lambda: deepspeed.initialize(config=config(1))),
        (BadInput, lambda: deepspeed.initialize(model=model())),
        (BadInput, lambda: deepspeed.zero.Init(module=model())),
        (BadInput, lambda: deepspeed.initialize(model=whole, config=config(1, **lamb))),
    ]
    messages = []
    for kind, attempt in attempts:
        with pytest.raises(kind) as caught:
            attempt()
        messages.append(str(caught.value))
    assert whole[0].weight.dtype is torch.float32  # as it was
    return messages


def in_order() -> list[int]:
    """Where in the order of `initialize` each model is that `GatheredParameters` goes through."""
    models = [model() for _ in range(8)]
    engines = [deepspeed.initialize(model=each, config=config(3))[0] for each in models]
    own = [engine.module for engine in engines]
    return [next(n for n, each in enumerate(own) if each is found) for found in list(deepspeed.zero.SHARDED)[-8:]]


def test_models_are_met_in_the_order_of_initialize(two_processes: Pool) -> None:
    assert two_processes.run(in_order) == [list(range(8))] * 2


def test_what_cannot_be_done_says_what_to_do(two_processes: Pool) -> None:
    expected = ("engine.backward(loss)", "optimizer", "before it", "offload_states", "multiple of", "leave both out")
    expected += ("torch.nn.Module", "config=", "deepspeed.initialize", "Lamb")
    for messages in two_processes.run(refused):
        for message, word in zip(messages, expected, strict=True):
            assert word in message


def odds_and_ends() -> dict[str, Any]:
    """Data, the script's own optimizer and schedule, gathered parameters, compilation, what the engine answers."""
    built = model()
    built.flavour = "salty"  # type: ignore[assignment]
    built._no_split_modules = ["Linear"]  # type: ignore[assignment]  # units, to be compiled
    groups = [{"params": built[0].parameters(), "lr": 0.5}, {"params": built[3].parameters()}]
    data = TensorDataset(torch.arange(20.0).view(20, 1).expand(20, 8).contiguous(), torch.zeros(20, 4))
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=built,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        model_parameters=groups,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        config={"train_batch_size": 2 * MICRO, "zero_optimization": {"stage": 3}, "dataloader_drop_last": True},
    )
    assert optimizer is engine.optimizer
    loader = engine.deepspeed_io(data, num_local_io_workers=0)  # this process may have no children
    with pytest.raises(BadInput, match="compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    engine.compile(backend="eager", compiled_autograd_enabled=False)
    assert all(hasattr(built[layer].forward, "_torchdynamo_orig_callable") for layer in (0, 3))
    with pytest.raises(BadInput, match="Sequential is a single one"):
        deepspeed.initialize(model=model(), config=config(3))[0].compile()
    orders = [[int(value) for inputs, _ in loader for value in inputs[:, 0]] for _ in range(2)]
    for inputs, targets in loader:
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    with deepspeed.zero.GatheredParameters(built[0].bias, modifier_rank=1):
        if engine.global_rank == 1:
            built[0].bias.data.fill_(7.0)
    with deepspeed.zero.GatheredParameters([built[0].bias]):
        written = built[0].bias.tolist()
    assert torch.optim.lr_scheduler.StepLR is type(schedule)
    return {
        "orders": orders,
        "written": written,
        "lr": engine.get_lr(),
        "momentum": engine.get_mom(),
        "answers": (engine.bfloat16_enabled(), engine.zero_optimization_stage(), engine.optimizer_name(), len(loader)),
        "its own": engine.flavour,
    }


def test_the_rest_of_the_engine(two_processes: Pool) -> None:
    both = two_processes.run(odds_and_ends)
    for rank, found in enumerate(both):
        sampler = torch.utils.data.DistributedSampler(range(20), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        assert found["orders"] == [list(sampler)[:8]] * 2
        assert found["written"] == [7.0] * 16
        assert found["lr"] == [0.125, 0.025]
        assert found["momentum"] == [0.9, 0.9]
        assert found["answers"] == (False, 3, "sgd", 2)
        assert found["its own"] == "salty"
