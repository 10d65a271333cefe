"""Saving and loading sharded training state on ranks that are threads; the oracle is a run never stopped."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.storage import local
from terrazzo.errors import BadInput, SaveFailed
from tests.helpers.cover import mostly_long
from tests.helpers.threads import exclusive, run_in_threads


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


Trained = tuple[nn.Module, Any]


def build(plan: str, width: int = 10, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Trained:
    with exclusive():
        torch.manual_seed(0)
        model = nn.Sequential(Layer(width), Layer(width), nn.Linear(width, 3))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), "lr": 1e-2}]
    return tz.shard(model, optimizer(groups, lr=3e-3), plan=plan, units=[Layer])


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Steps `first` up to, not including, `last`, on the same examples on every rank; the losses."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 10, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full_state(model: nn.Module) -> dict[str, Tensor]:
    with tz.gathered(model) as parameters:
        state = {name: value.detach().clone() for name, value in parameters.items()}
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


def saved_after_three_steps(path: Path, plan: str, world_size: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train three steps, save, train three more: the state that was saved and the losses after it."""

    def body(rank: int) -> tuple[dict[str, Tensor], list[float]]:
        model, optimizer = build(plan)
        train(model, optimizer, 0, 3)
        optimizer.param_groups[1]["lr"] = 5e-3
        checkpoint.save(path, model, optimizer, {"step": 3, "note": [1, None, 0.1]})
        return full_state(model), train(model, optimizer, 3, 6)

    return run_in_threads(world_size, body)[0]


@pytest.mark.parametrize("plan", mostly_long(["zero0", "zero1", "zero2", "zero3"], "zero1", "zero3"))
def test_the_same_ranks_continue_bitwise(tmp_path: Path, plan: str) -> None:
    path = tmp_path / "step-00000003"
    state, losses = saved_after_three_steps(path, plan, 2)

    def resume(rank: int) -> None:
        model, optimizer = build(plan)
        train(model, optimizer, 7, 9)  # somewhere else entirely
        extra = checkpoint.load(path, model, optimizer)
        assert extra == {"step": 3, "note": [1, None, 0.1]}
        assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 5e-3]
        loaded = full_state(model)
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        assert train(model, optimizer, 3, 6) == losses

    run_in_threads(2, resume)


OTHERS = [("zero0", 1), ("zero1", 3), ("zero3", 3), ("zero2", 4)]


@pytest.mark.parametrize(("plan", "world_size"), mostly_long(OTHERS, OTHERS[0], OTHERS[3]))
def test_other_ranks_and_plans_continue_from_the_same_bits(tmp_path: Path, plan: str, world_size: int) -> None:
    path = tmp_path / "step-00000003"
    state, losses = saved_after_three_steps(path, "zero3", 2)

    def resume(rank: int) -> None:
        model, optimizer = build(plan)
        checkpoint.load(path, model, optimizer)
        loaded = full_state(model)
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        assert train(model, optimizer, 3, 6) == pytest.approx(losses, abs=1e-6)

    run_in_threads(world_size, resume)


def test_replicated_states_are_written_once(tmp_path: Path) -> None:
    sizes = {}
    for plan in ("zero0", "zero3"):
        saved_after_three_steps(tmp_path / plan, plan, 2)
        sizes[plan] = sum(file.stat().st_size for file in (tmp_path / plan).glob("*.safetensors"))
    assert sizes["zero0"] == pytest.approx(sizes["zero3"], rel=0.25), "the rest is names"


def test_before_the_first_step_there_is_only_weight(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = build("zero3")
        checkpoint.save(tmp_path / "new", model, optimizer, {})
        expected = train(model, optimizer, 0, 2)
        model, optimizer = build("zero3")
        train(model, optimizer, 5, 6)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():
            for value in parameters.values():
                value.zero_()
        model, optimizer = build("zero3")
        checkpoint.load(tmp_path / "new", model, optimizer)
        assert train(model, optimizer, 0, 2) == expected

    run_in_threads(2, body)


def test_optimizer_states_of_what_is_frozen_here_are_left_out_with_a_warning(tmp_path: Path) -> None:
    def loaded(frozen: bool, first: bool) -> Trained:
        with exclusive():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3))
        model[0].requires_grad_(not frozen)
        trainable = [value for value in model.parameters() if value.requires_grad]
        trained = tz.shard(model, torch.optim.AdamW(trainable), plan="zero3", units=[nn.Linear])
        if first:
            train(*trained, 0, 1)
            checkpoint.save(tmp_path / "a", *trained, {})
        else:
            checkpoint.load(tmp_path / "a", *trained)
        return trained

    run_in_threads(2, lambda rank: loaded(frozen=False, first=True))
    run_in_threads(2, lambda rank: loaded(frozen=False, first=False))  # a warning would be an error
    words = f"'{re.escape(str(tmp_path))}/a' has an optimizer's states of 0.weight, 0.bias, which no"
    with pytest.warns(UserWarning, match=words) as caught:
        run_in_threads(2, lambda rank: loaded(frozen=True, first=False))
    assert len(caught) == 1  # of rank 0


def test_weights_alone_can_be_taken_from_a_checkpoint_or_a_mapping(tmp_path: Path) -> None:
    state, _ = saved_after_three_steps(tmp_path / "a", "zero3", 2)

    def body(rank: int) -> None:
        for source in (tmp_path / "a", state):
            model, _ = build("zero1")
            checkpoint.load_weights(model, source)
            loaded = full_state(model)
            assert all(torch.equal(loaded[name], state[name]) for name in state)

    run_in_threads(3, body)


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    saved, _ = saved_after_three_steps(tmp_path / "a", "zero3", 2)

    def body(rank: int) -> None:
        model, optimizer = build("zero3", width=12)
        before = full_state(model)
        with pytest.raises(BadInput) as caught:
            checkpoint.load(tmp_path / "a", model, optimizer)
        message = str(caught.value)
        assert "0.linear.weight is [10, 10] in the checkpoint and [12, 12] in the model" in message
        assert len(re.findall(r" in the checkpoint and ", message)) == 3, "the first three"
        differing = [name for name, value in before.items() if list(value.shape) != list(saved[name].shape)]
        assert f"; and {len(differing) - 3} more like these. " in message
        assert "exp_avg" not in message, "states of what has another shape are not named again"
        assert message.endswith("or begin anew in another folder.")
        assert all(torch.equal(value, before[name]) for name, value in full_state(model).items())
        model, optimizer = build("zero3", optimizer=torch.optim.SGD)
        with pytest.raises(BadInput, match=r"not fit[^;]*: its optimizer is AdamW, this one is SGD\. "):
            checkpoint.load(tmp_path / "a", model, optimizer)

    run_in_threads(2, body)


def test_names_of_a_module_that_holds_the_model_are_said_once(tmp_path: Path) -> None:
    """As Lightning's files have them."""
    held = torch.nn.ModuleDict({"model": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))})
    torch.save(held.state_dict(), tmp_path / "held.pt")

    def body(rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        tz.shard(model, None, plan="zero3", units=["0"])
        with pytest.raises(BadInput, match=r"each of its names has 'model\.' in front") as caught:
            checkpoint.load(tmp_path / "held.pt", model, None)
        assert "missing" not in str(caught.value)

    run_in_threads(2, body)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    saved_after_three_steps(tmp_path / "a", "zero3", 2)
    (tmp_path / "a" / "rank-00001.safetensors").unlink()

    def body(rank: int) -> None:
        model, optimizer = build("zero3")
        with pytest.raises(BadInput, match="rank-00001"):
            checkpoint.load(tmp_path / "a", model, optimizer)

    run_in_threads(2, body)


def test_an_existing_checkpoint_and_values_beyond_json_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = build("zero3")
        with pytest.raises(BadInput, match="extra holds a value"):
            checkpoint.save(tmp_path / "a", model, optimizer, {"step": {1, 2}})
        checkpoint.save(tmp_path / "a", model, optimizer, {})
        with pytest.raises(BadInput, match="exists already"):
            checkpoint.save(tmp_path / "a", model, optimizer, {})

    run_in_threads(2, body)


def test_a_rank_that_cannot_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = local.LocalDraft.create

    def fails_on_the_second_file(draft: local.LocalDraft, file: str, size_bytes: int) -> Any:
        if file == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")
        return create(draft, file, size_bytes)

    monkeypatch.setattr(local.LocalDraft, "create", fails_on_the_second_file)

    def body(rank: int) -> None:
        model, optimizer = build("zero3")
        with pytest.raises(SaveFailed, match=r"rank 1: OSError.*No space left"):
            checkpoint.save(tmp_path / "step-00000001", model, optimizer, {})
        assert checkpoint.latest(tmp_path) is None

    run_in_threads(2, body)
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_safetensors_and_json_is_written(tmp_path: Path) -> None:
    saved_after_three_steps(tmp_path / "a", "zero1", 2)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["manifest.json", "manifest.sha256", "rank-00000.safetensors", "rank-00001.safetensors"]
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["topology"]["world_size"] == 2
    assert manifest["tensors"]["0.linear.weight"]["shape"] == [10, 10]
    assert set(manifest["tensors"]["0.linear.weight"]["states"]) == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


def test_files_are_for_their_owner_only_and_sealed_for_sha256sum(tmp_path: Path) -> None:
    saved_after_three_steps(tmp_path / "a", "zero3", 2)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").iterdir()} == {0o600}
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=tmp_path / "a", check=True)


def test_safetensors_itself_reads_the_files_and_finds_the_same_bytes(tmp_path: Path) -> None:
    state, _ = saved_after_three_steps(tmp_path / "a", "zero3", 2)
    found = {name: torch.zeros_like(value).reshape(-1) for name, value in state.items()}
    for rank in range(2):
        for key, values in load_file(tmp_path / "a" / f"rank-{rank:05d}.safetensors").items():
            name, kind, start = key.split("|")
            if kind in ("weight", "buffer"):
                found[name][int(start) : int(start) + len(values)] = values
    assert all(torch.equal(found[name], value.reshape(-1)) for name, value in state.items())


def test_narrower_masters_are_refused_unless_asked_for(tmp_path: Path) -> None:
    saved_after_three_steps(tmp_path / "a", "zero3", 2)

    def body(rank: int) -> None:
        with exclusive():
            torch.manual_seed(0)
            model = nn.Sequential(Layer(10), Layer(10), nn.Linear(10, 3))
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters())}]
        model, optimizer = tz.shard(model, torch.optim.AdamW(groups), plan="zero3", precision="bf16-pure")
        with pytest.raises(BadInput, match=r"2\.weight, weight is torch.float32.* and \d+ more.*cast=True"):
            checkpoint.load(tmp_path / "a", model, optimizer)
        checkpoint.load(tmp_path / "a", model, optimizer, cast=True)

    run_in_threads(2, body)


def test_groups_are_found_by_their_parameters_whatever_their_order(tmp_path: Path) -> None:
    saved_after_three_steps(tmp_path / "a", "zero3", 2)

    def body(rank: int) -> None:
        with exclusive():
            model = nn.Sequential(Layer(10), Layer(10), nn.Linear(10, 3))
        groups = [{"params": list(model[1:].parameters())}, {"params": list(model[0].parameters())}]
        sharded, optimizer = tz.shard(model, torch.optim.AdamW(groups, lr=1.0), plan="zero3", units=[Layer])
        checkpoint.load(tmp_path / "a", sharded, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 3e-3]
        with exclusive():
            model = nn.Sequential(Layer(10), Layer(10), nn.Linear(10, 3))
        groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2:].parameters())}]
        sharded, optimizer = tz.shard(model, torch.optim.AdamW(groups), plan="zero3", units=[Layer])
        with pytest.raises(
            BadInput, match=r"group 0 puts 0\.linear\.bias and 1\.linear\.bias together, which have different lr"
        ):
            checkpoint.load(tmp_path / "a", sharded, optimizer)

    run_in_threads(2, body)


def test_a_hyper_parameter_that_is_none_is_as_good_as_missing(tmp_path: Path) -> None:
    """In the groups that the saved ones become; what AdamW does not know is nobody's matter."""

    def built(several: bool, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        with exclusive():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": list(model[0].parameters()), **more}, {"params": list(model[1].parameters())}]
        return tz.shard(model, torch.optim.AdamW(groups if several else model.parameters(), lr=0.5), plan="zero3")

    def body(rank: int) -> None:
        checkpoint.save(tmp_path / "a", *built(True, note=None))
        model, optimizer = built(False)
        checkpoint.load(tmp_path / "a", model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]

    run_in_threads(1, body)


class Normed(nn.Module):
    """Two modules that share one buffer, which takes part in what the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_buffer("scale", torch.ones(4))
        self.second.register_buffer("scale", self.first.scale)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.first(x) * self.first.scale
        return self.second(first)


class Swapped(nn.Module):
    """The same parameters; the module that comes first has the other name of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_buffer("scale", torch.ones(4))
        self.second.register_buffer("scale", self.first.scale)

    forward = Normed.forward


def normed(kind: type[nn.Module] = Normed) -> Trained:
    with exclusive():
        model = kind()
    return tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="zero3")


@pytest.mark.parametrize("kind", [Normed, Swapped])
def test_a_shared_buffer_is_saved_once_and_found_under_either_name(tmp_path: Path, kind: type[nn.Module]) -> None:
    def body(rank: int) -> None:
        model, optimizer = normed()
        model.first.scale.fill_(3.0)
        checkpoint.save(tmp_path / "a", model, optimizer, {})
        names = json.loads((tmp_path / "a" / "manifest.json").read_text())["tensors"]
        assert [name for name in names if "scale" in name] == ["first.scale"]
        for load in (
            lambda m, o: checkpoint.load(tmp_path / "a", m, o),
            lambda m, _: checkpoint.load_weights(m, tmp_path / "a"),
        ):
            other, other_optimizer = normed(kind)
            load(other, other_optimizer)
            assert torch.equal(other.second.scale, torch.full((4,), 3.0))
            assert other.first.scale is other.second.scale

    run_in_threads(2, body)


def pair(tied: bool) -> Trained:
    with exclusive():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if tied:
        model[1].weight = model[0].weight
    return tz.shard(model, torch.optim.AdamW(model.parameters()), plan="zero3", units=[nn.Linear])


@pytest.mark.parametrize("given", [True, False])
def test_weights_that_were_tied_come_apart_with_a_warning_and_are_not_tied_on_loading(
    tmp_path: Path, given: bool
) -> None:
    """As torch's own state dicts have them: the same values under both names."""

    def body(rank: int) -> None:
        trained = {tied: pair(tied) for tied in (True, False)}
        for tied, (model, optimizer) in trained.items():
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            checkpoint.save(tmp_path / str(tied), model, optimizer, {})
        model, optimizer = trained[False]
        checkpoint.load(tmp_path / "True", model, optimizer if given else None)
        with tz.gathered(model) as apart, tz.gathered(trained[True][0]) as tied_ones:
            assert torch.equal(apart["0.weight"], apart["1.weight"])
            assert torch.equal(apart["0.weight"], tied_ones["0.weight"])
        model, optimizer = trained[True]
        with pytest.raises(BadInput, match=r"not in the model: 1\.weight"):
            checkpoint.load(tmp_path / "False", model, optimizer if given else None)

    with pytest.warns(
        UserWarning, match=r"0\.weight and 1\.weight are one tensor, and here several: .* tie them"
    ) as told:
        run_in_threads(2, body)
    assert len(told) == 1


def test_buffers_that_differ_between_ranks_are_all_those_of_rank_0(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = build("zero3")
        for _, buffer in model.named_buffers():
            buffer.fill_(rank + 5)
        checkpoint.save(tmp_path / "a", model, optimizer, {})
        checkpoint.load(tmp_path / "a", model, optimizer)
        assert {float(value) for _, buffer in model.named_buffers() for value in buffer.flatten()} == {5.0}

    run_in_threads(3, body)


def test_the_loss_scale_of_an_own_loop_is_restored(tmp_path: Path) -> None:
    def built() -> Trained:
        with exclusive():
            model = nn.Sequential(nn.Linear(10, 3))
        return tz.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan="zero1", precision="fp16")

    def body(rank: int) -> None:
        model, optimizer = built()
        counters = optimizer.scaler_state() | {"scale": 32.0, "skipped_steps": 11, "good_steps": 7}
        optimizer.load_scaler_state(counters)
        checkpoint.save(tmp_path / "a", model, optimizer, {})
        model, optimizer = built()
        checkpoint.load(tmp_path / "a", model, optimizer)
        assert optimizer.scaler_state() == counters
        assert optimizer.loss_scale == 32.0

    run_in_threads(2, body)


@pytest.mark.parametrize("function", ["begin", "commit"])
def test_what_fails_on_rank_0_alone_is_raised_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fails(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local.LocalDraft, function, fails)

    def body(rank: int) -> None:
        model, optimizer = build("zero3")
        with pytest.raises(SaveFailed, match=r"rank 0: PermissionError"):
            checkpoint.save(tmp_path / "a", model, optimizer, {})

    run_in_threads(2, body)


def test_extra_that_fails_on_one_rank_or_in_the_manifest_is_raised_on_every_rank(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = build("zero3")
        with pytest.raises(BadInput, match="extra holds a value"):
            checkpoint.save(tmp_path / "a", model, optimizer, {"x": {1} if rank == 1 else 1})
        with pytest.raises(BadInput, match="whole number of finished steps"):
            checkpoint.save(tmp_path / "a", model, optimizer, {"step": "many"})

    run_in_threads(2, body)


def test_adapters_of_other_settings_are_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.checkpoint.loading.load.misfits", lambda *_: ["missing: a.lora_A.weight"])

    def body(rank: int) -> None:
        checkpoint.save(tmp_path / "a", *build("zero3"), {})
        with pytest.raises(BadInput, match=r"this run \(adapters differ: .*: missing: a\.lora_A"):
            checkpoint.load(tmp_path / "a", *build("zero3"))

    run_in_threads(2, body)


class Counting(nn.Linear):
    """Keeps a number, beside its weights, where state dicts have it."""

    count: int | None = None

    def get_extra_state(self) -> Any:
        return None if self.count is None else {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = None if state is None else state["count"]


def test_what_modules_keep_beside_tensors_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = tz.shard(nn.Sequential(Counting(3, 3)), torch.optim.SGD, "zero3")
        checkpoint.save(tmp_path / "none", model, optimizer)
        checkpoint.load_weights(model, tmp_path / "none")
        model[0].count = 7
        with pytest.raises(BadInput, match=r"get_extra_state of '0' \(Counting\) gives a dict.*extra=\{\.\.\.\}"):
            checkpoint.save(tmp_path / "seven", model, optimizer)
        with pytest.raises(BadInput, match=r"missing '0\._extra_state'"):
            checkpoint.load_weights(model, tmp_path / "none")

    run_in_threads(2, body)
    assert [found.name for found in tmp_path.iterdir()] == ["none"]


def test_a_path_that_one_rank_does_not_see_is_refused_on_all(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")

    def body(rank: int) -> None:
        model, _ = tz.shard(nn.Linear(3, 3), None, "zero3")
        with pytest.raises(BadInput, match="absent"):
            checkpoint.load_weights(model, tmp_path / ("absent.pt" if rank == 1 else "weights.pt"))

    run_in_threads(2, body)


def test_a_full_state_dict_brings_what_modules_keep_beside_tensors() -> None:
    plain = nn.Sequential(Counting(3, 3))
    plain[0].count = 7

    def body(rank: int) -> dict[str, Any]:
        model, _ = tz.shard(nn.Sequential(Counting(3, 3)), None, "zero3")
        assert model.load_state_dict(plain.state_dict()) == ([], [])
        return tz.full_state_dict(model, keep=True)

    for state in run_in_threads(2, body):
        found = nn.Sequential(Counting(3, 3))
        found.load_state_dict(state)
        assert found[0].count == 7 and torch.equal(found[0].weight, plain[0].weight)
