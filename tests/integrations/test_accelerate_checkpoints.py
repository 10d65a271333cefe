"""`save_state` and `load_state` of the drop-in: exact on the same ranks, and on others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from terrazzo.errors import SaveFailed
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool
from tests.integrations.accelerating import Block, Loop, fresh_state, small_model

pytest.importorskip("accelerate")

pytestmark = pytest.mark.processes


def seeded() -> Any:
    """The order of samples follows from the epoch: without it Accelerate's own checkpoints do not continue it."""
    from accelerate import DataLoaderConfiguration

    return DataLoaderConfiguration(use_seedable_sampler=True)


class Counter:
    """A registered object."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _loop(plan: str, **arguments: Any) -> tuple[Loop, Counter]:
    from terrazzo.integrations.accelerate import Accelerator

    fresh_state()
    arguments["dataloader_config"] = seeded()
    loop = Loop(Accelerator(cpu=True, plan=plan, gradient_accumulation_steps=3, **arguments), clip=0.5)
    counter = Counter()
    loop.accelerator.register_for_checkpointing(counter)
    return loop, counter


def _resumed(folder: str, one: str, other: str) -> tuple[bool, bool, Any]:
    loop, counter = _loop(one)
    torch.manual_seed(11)
    loop.epoch()
    counter.value = 7
    for _ in range(2):  # over the first one
        loop.accelerator.save_state(folder)
    before, step = loop.weights(), loop.accelerator.step
    drawn = torch.rand(3)
    loop.losses.clear()
    loop.data.set_epoch(1)
    loop.epoch()
    again, found = _loop(other)
    again.accelerator.load_state(folder)
    assert again.accelerator.step == step
    assert found.value == 7
    assert torch.equal(torch.rand(3), drawn)
    same = all(torch.equal(values, before[name]) for name, values in again.weights().items())
    again.data.set_epoch(1)  # as scripts do: the sampler draws by it
    again.epoch()
    end = loop.weights()
    exact = all(torch.equal(values, end[name]) for name, values in again.weights().items())
    close = max(abs(a - b) for a, b in zip(loop.losses, again.losses, strict=True))
    return (
        same,
        exact and loop.losses == again.losses,
        (close, again.scheduler.get_last_lr(), loop.scheduler.get_last_lr()),
    )


@pytest.mark.parametrize("plan", mostly_long(["zero0", "zero1", "zero2", "zero3"], "zero3"))
def test_resuming_is_exact(plan: str, two_processes: Pool, tmp_path: Path) -> None:
    for same, exact, (_, now, then) in two_processes.run(_resumed, str(tmp_path), plan, plan):
        assert same
        assert exact
        assert now == then
    assert {"terrazzo", "scheduler.bin", "custom_checkpoint_0.pkl"} <= {path.name for path in tmp_path.iterdir()}
    assert [path.name for path in (tmp_path / "terrazzo").iterdir() if path.is_dir()] == ["step-00000002"]


def test_another_plan_resumes(two_processes: Pool, tmp_path: Path) -> None:
    for same, _, (close, now, then) in two_processes.run(_resumed, str(tmp_path), "zero3", "zero1"):
        assert same
        assert close < 1e-6
        assert now == then


def _named(folder: str) -> None:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    loop, counter = _loop("zero2", project_config=project)
    for value in range(3):
        loop.epoch()
        counter.value = value
        loop.accelerator.save_state()
    loop.accelerator.wait_for_everyone()
    again, found = _loop("zero2", project_config=project)
    again.accelerator.load_state()
    assert found.value == 2
    newest = loop.weights()
    assert all(torch.equal(values, newest[name]) for name, values in again.weights().items())


def _passed_over(folder: str) -> tuple[str, list[str]]:
    """What is said where older ones cannot be removed; and of the newest one, damaged."""
    loop, _ = _loop("zero3")
    loop.accelerator.save_state(folder)
    unremoved = patch("terrazzo.integrations.accelerate.checkpoints.prune", side_effect=OSError("stays"))
    with unremoved, pytest.raises(SaveFailed) as told:
        loop.accelerator.save_state(folder)
    loop.accelerator.wait_for_everyone()
    (Path(folder) / "terrazzo" / "step-00000002" / "manifest.sha256").write_text("")
    loop.accelerator.wait_for_everyone()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop.accelerator.load_state(folder)
    return str(told.value), [str(each.message) for each in warned if "DAMAGED" in str(each.message)]


def test_every_rank_hears_what_was_not_removed_and_the_first_what_was_passed_over(
    two_processes: Pool, tmp_path: Path
) -> None:
    (told, (warned,)), (told_too, nothing) = two_processes.run(_passed_over, str(tmp_path))
    assert told == told_too == "rank 0: OSError: stays"
    assert f"resume: {tmp_path}/terrazzo/step-00000002 is DAMAGED, not used: " in warned
    assert not nothing


def test_accelerates_names_and_limit_hold(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(_named, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]


def _hooked(folder: str) -> tuple[list[str], list[int]]:
    """Hooks that write the model in a form of their own, as scripts for diffusion models have them."""
    loop, _ = _loop("zero3")
    seen: list[str] = []
    sizes: list[int] = []

    def save(models: list[Any], weights: list[Any], output: str) -> None:
        while models:
            seen.append(type(models.pop()).__name__)
            sizes.append(len(weights.pop()))

    loop.accelerator.register_save_state_pre_hook(save)
    loop.accelerator.register_load_state_pre_hook(lambda models, output: seen.extend(output for _ in models))
    loop.accelerator.save_state(folder)
    loop.accelerator.load_state(folder)
    return seen, sizes


def test_hooks_of_the_script_see_the_models(two_processes: Pool, tmp_path: Path) -> None:
    results = two_processes.run(_hooked, str(tmp_path))
    assert results == [(["Sequential", str(tmp_path)], [14]), (["Sequential", str(tmp_path)], [0])]


def _from_accelerate(folder: str) -> float:
    import accelerate

    fresh_state()
    theirs = Loop(accelerate.Accelerator(cpu=True, dataloader_config=seeded()))
    theirs.epoch()
    theirs.accelerator.save_state(folder)
    theirs.accelerator.wait_for_everyone()
    theirs.losses.clear()
    theirs.data.set_epoch(1)
    theirs.epoch()

    from terrazzo.integrations.accelerate import Accelerator

    fresh_state()
    ours = Loop(Accelerator(cpu=True, plan="zero3", units=[Block], dataloader_config=seeded()))
    ours.accelerator.load_state(folder)
    ours.data.set_epoch(1)
    ours.epoch()
    return max(abs(a - b) for a, b in zip(theirs.losses, ours.losses, strict=True))


def test_accelerates_own_checkpoint_resumes(two_processes: Pool, tmp_path: Path) -> None:
    assert two_processes.run(_from_accelerate, str(tmp_path)) == [0.0, 0.0]


def _two_models(folder: str) -> bool:
    """Two models with an optimizer each, as a generator and its critic."""
    from terrazzo.integrations.accelerate import Accelerator

    def trained(load: str | None) -> Any:
        fresh_state()
        accelerator = Accelerator(cpu=True, plan="zero3")
        models = [small_model(), small_model()]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01 * n) for n, model in enumerate(models, 1)]
        prepared = accelerator.prepare(optimizers[1], models[0], models[1], optimizers[0])
        if load:
            accelerator.load_state(load)
        else:
            for model, optimizer in ((prepared[1], prepared[3]), (prepared[2], prepared[0])):
                accelerator.backward(model(torch.ones(2, 16)).sum())
                optimizer.step()
            accelerator.save_state(folder)
        return [accelerator.get_state_dict(model) for model in prepared[1:3]]

    first, again = trained(None), trained(folder)
    return all(torch.equal(b[n], v) for a, b in zip(first, again, strict=True) for n, v in a.items())


def test_several_models_each_have_their_own(two_processes: Pool, tmp_path: Path) -> None:
    assert two_processes.run(_two_models, str(tmp_path)) == [True, True]
    assert (tmp_path / "terrazzo_1").is_dir()
