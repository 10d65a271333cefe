"""Importing files of `torch.save`: plain loops write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.checkpoint import Source, load, open_source
from terrazzo.checkpoint.importers import open_foreign
from terrazzo.checkpoint.importers.parts.numbering import ModelNames
from terrazzo.errors import BadInput
from tests.helpers.imported import Net, RunsCode, assert_same, names_of, states_of, train, trained
from tests.helpers.threads import run_in_threads


def imported(path: Path, content: Any, names: Sequence[str] = ()) -> Source:
    torch.save(content, path / "file.pt")
    return open_foreign(path / "file.pt", ModelNames(names))


def adamw(net: nn.Module, groups: Sequence[Sequence[str]], **settings: Any) -> torch.optim.AdamW:
    """An optimizer over groups of parameters by name, each with a weight decay of its own; it has trained two steps."""
    named = dict(net.named_parameters())
    decays = [{"params": [named[n] for n in names], "weight_decay": 0.5**i} for i, names in enumerate(groups)]
    optimizer = torch.optim.AdamW(decays, **settings)
    train(net, optimizer)
    return optimizer


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module", ""])
def test_weights_under_any_usual_key(tmp_path: Path, key: str) -> None:
    net, _ = trained(tied=True)
    source = imported(tmp_path, {key: net.state_dict(), "epoch": 3} if key else net.state_dict())
    assert_same(source, states_of(net))
    assert source.aliases == {"head.weight": "embedding.weight"}
    assert source.extra == ({"epoch": 3} if key else {})
    assert source.optimizer is None
    assert source.notes == []


@pytest.mark.parametrize("frozen", [True, False])
def test_a_whole_program_by_numbers(tmp_path: Path, frozen: bool) -> None:
    net, optimizer = trained(frozen=frozen, tied=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = {
        "scale": 1024.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    program = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler,
        "step": 9,
        "best": torch.tensor(0.5),
        "rng": torch.get_rng_state(),
    }
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    source = imported(tmp_path, program, names)
    assert_same(source, states_of(net, optimizer))
    assert source.optimizer is not None
    (group,) = source.optimizer.groups
    assert group["params"] == names
    assert (group["lr"], group["betas"], group["amsgrad"]) == (3e-2, [0.8, 0.9], False)
    assert source.optimizer.scaler == {"scale": 1024.0, "skipped_steps": 0, "good_steps": 7, "patience": 1}
    assert source.step == 2, "the optimizer's own count, not the program's"
    assert source.extra["step"] == 9
    assert source.extra["best"] == 0.5
    assert source.extra["scheduler"]["base_lrs"] == [3e-2]
    assert [note.split(" ")[0] for note in source.notes] == ["rng"]


def test_without_names_the_weights_come_alone_and_a_note_says_why(tmp_path: Path) -> None:
    net, optimizer = trained()
    source = imported(tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    assert_same(source, states_of(net))
    assert source.optimizer is None
    assert len(source.optimizer_notes) == 1
    assert "with the model" in source.optimizer_notes[0]


def test_names_in_the_file_come_first(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(reversed(list(net.named_parameters())), lr=1e-2)
    train(net, optimizer)
    program = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    for names in ([], names_of(net)):
        source = imported(tmp_path, program, names)
        assert_same(source, states_of(net, optimizer))
        assert source.optimizer is not None
        assert source.optimizer.groups[0]["params"] == names_of(net)[::-1]


@pytest.mark.parametrize(
    "is_last",
    [
        lambda name, p: name.endswith("bias") or "norm" in name,
        lambda name, p: p.ndim < 2,
        lambda name, p: name.startswith(("layers.1", "head")),
    ],
)
def test_groups_as_programs_make_them(tmp_path: Path, is_last: Callable[[str, Tensor], bool]) -> None:
    """No weight decay for some, and groups one after the other, such as one for each part of a model."""
    net = Net()
    groups = [[name for name, p in net.named_parameters() if is_last(name, p) == last] for last in (False, True)]
    optimizer = adamw(net, groups)
    source = imported(tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, names_of(net))
    assert_same(source, states_of(net, optimizer))
    assert source.optimizer is not None
    assert [group["params"] for group in source.optimizer.groups] == groups
    assert [group["weight_decay"] for group in source.optimizer.groups] == [1.0, 0.5]


def test_frozen_parameters_are_left_out_where_shapes_or_the_caller_tell_which(tmp_path: Path) -> None:
    net = Net()
    groups = [names_of(net)[1:]]  # the embedding is frozen, and the head of the same shape is the last
    optimizer = adamw(net, groups)
    program = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    assert_same(imported(tmp_path, program, names_of(net)), states_of(net, optimizer))
    optimizer = adamw(net, [[name for name in names_of(net) if "layers.1" not in name]])
    program["optimizer"] = optimizer.state_dict()
    with pytest.raises(BadInput, match=r"could be layers\.\d\S* or layers\.\d\S*\. Give the model"):
        imported(tmp_path, program, names_of(net))
    frozen = [name for name in names_of(net) if "layers.1" in name]
    assert_same(open_foreign(tmp_path / "file.pt", ModelNames(names_of(net), frozen)), states_of(net, optimizer))


def layers_last_first(groups: bool) -> tuple[nn.Sequential, torch.optim.AdamW]:
    """Alike layers, and an optimizer that lists them in another order: in a group each, or in one."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    each = [{"params": [*net[i].parameters()], "lr": 1e-3 * 2.0**i} for i in reversed(range(4))]
    return net, torch.optim.AdamW(each if groups else [p for group in each for p in group["params"]])


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("groups", [True, False])
def test_numbers_are_in_the_order_of_the_runs_own_groups(tmp_path: Path, groups: bool) -> None:
    """The oracle is torch's own resumption, and there is a note, as the model's order fits too."""
    net, optimizer = layers_last_first(groups)
    steps(net, optimizer, 1)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    steps(net, optimizer, 2)

    def body(rank: int) -> None:
        model, own = tz.shard(*layers_last_first(groups))
        rates = [group["lr"] for group in own.param_groups]
        load(tmp_path / "file.pt", model, own)
        assert [group["lr"] for group in own.param_groups] == rates
        steps(model, own, 2)
        found = tz.full_state_dict(model)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(found[name], value)

    with pytest.warns(UserWarning, match="in the order of this run.s param groups"):
        run_in_threads(1, body)


def test_groups_that_fit_in_another_order_are_refused(tmp_path: Path) -> None:
    net, optimizer = layers_last_first(groups=True)
    steps(net, optimizer, 1)
    program = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(BadInput, match=r"one could be 2\.weight or 3\.weight.*run with the same param groups"):
        imported(tmp_path, program, names_of(net))
    net = nn.ParameterList([torch.ones(size) for size in (3, 5) * 3])
    rotated = [{"params": [*net[:2]]}, {"params": [*net[2:5]]}, {"params": [*net[5:]]}]  # each moves, or none fits
    optimizer = torch.optim.AdamW(rotated)
    sum(each.sum() for each in net).backward()
    optimizer.step()
    with pytest.raises(BadInput, match="one could be 0 or 4"):
        imported(tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, names_of(net))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (lambda names: names[1:], "12 parameters, and the model 11"),
        (
            lambda names: [names[1], names[0], *names[2:]],
            r"parameter 0 has the shape \[11, 5\], and layers\.0\.norm\.weight",
        ),
        (lambda names: [*names[:-1], "nothing"], "12 parameters, and the model 11"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, names: Callable[[list[str]], list[str]], message: str) -> None:
    net, optimizer = trained()
    program = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(BadInput, match=message):
        imported(tmp_path, program, names(names_of(net)))


@pytest.mark.parametrize("wrap", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_orig_mod.module.{}"])
def test_what_wrappers_put_into_names_is_taken_away(tmp_path: Path, wrap: str) -> None:
    net, optimizer = trained()
    inside = {"layers.0.": "layers.0._fsdp_wrapped_module.", "layers.1.": "layers.1._checkpoint_wrapped_module."}
    wrapped = {name: name for name in net.state_dict()}
    for plain, longer in inside.items():
        wrapped = {name: long.replace(plain, longer) for name, long in wrapped.items()}
    numbered = optimizer.state_dict()
    named = {
        "state": {wrap.format(wrapped[name]): numbered["state"][i] for i, name in enumerate(names_of(net))},
        "param_groups": [{"lr": 0.1, "params": [wrap.format(wrapped[name]) for name in names_of(net)]}],
    }
    model = {wrap.format(wrapped[name]): value for name, value in net.state_dict().items()}
    assert_same(imported(tmp_path, {"model": model, "optimizer": named}), states_of(net, optimizer))


def test_a_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    weights = {"module.w": torch.ones(2), "module.module.w": torch.zeros(3)}
    assert imported(tmp_path, weights, ["module.w", "module.module.w"]).tensors.keys() == weights.keys()
    assert imported(tmp_path, weights).tensors.keys() == {"w", "module.w"}
    with pytest.raises(BadInput, match=r"has 'w' twice, once as '_orig_mod\.w'"):
        imported(tmp_path, {"w": torch.ones(2), "_orig_mod.w": torch.ones(2)})


def test_views_and_dtypes(tmp_path: Path) -> None:
    base = torch.arange(60.0)
    weights = {
        "transposed": base.view(5, 12).t(),
        "strided": base[3:50:3],
        "scalar": base[7],
        "half": base.half(),
        "brain": base.bfloat16().view(3, 4, 5).permute(2, 0, 1),
        "long": torch.arange(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }
    source = imported(tmp_path, weights)
    assert_same(source, {(name, "weight"): value for name, value in weights.items()})
    assert source.aliases == {}


def test_steps_of_older_optimizers_and_states_that_are_none(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    state = {0: {"step": 5, "momentum_buffer": torch.ones(3, 2)}, 1: {"step": 5, "momentum_buffer": None}}
    program = {"model": net.state_dict(), "optimizer": {"state": state, "param_groups": [{"lr": 1, "params": [0, 1]}]}}
    source = imported(tmp_path, program, ["weight", "bias"])
    assert source.step == 5
    assert torch.equal(source.whole("bias", "step"), torch.tensor([5.0]))
    assert source.tensors["bias"].states.keys() == {"weight", "step"}
    assert torch.equal(source.whole("weight", "momentum_buffer"), torch.ones(3, 2))


def test_what_is_not_taken_over_is_named_as_it_is_loaded(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    states["state"][0]["words"] = "of another optimizer's"
    torch.save({"model": net.state_dict(), "optimizer": states}, tmp_path / "file.pt")

    def body(rank: int) -> None:
        model, own = tz.shard(nn.Linear(2, 3), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "zero3")
        load(tmp_path / "file.pt", model, own)
        assert torch.equal(tz.full_state_dict(model, keep=True)["weight"], net.weight.detach())
        assert own.param_groups[0]["lr"] == 0.5

    with pytest.warns(
        UserWarning, match="Of the checkpoint .*: words of weight, of the optimizer.*no tensor"
    ) as caught:
        run_in_threads(2, body)
    assert len(caught) == 1  # of rank 0


def test_what_is_left_out_of_the_weights_is_named_without_an_optimizer_too(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    weights = {**net.state_dict(), "_extra_state": "of another library's"}
    states = {"state": {0: {"words": "its own"}}, "param_groups": [{"params": [0, 1]}]}
    torch.save({"model": weights, "optimizer": states}, tmp_path / "file.pt")

    def body(rank: int) -> None:
        model, _ = tz.shard(nn.Linear(2, 3), None, "zero1")
        load(tmp_path / "file.pt", model, None)

    with pytest.warns(UserWarning, match="Of the checkpoint .*: _extra_state of the model is not.*") as caught:
        run_in_threads(1, body)
    assert "optimizer" not in str(caught[0].message)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def bomb() -> list[Any]:
    value: list[Any] = []
    for _ in range(50):
        value = [value, value]
    return value


GROUPS = [{"params": [0]}]
STATE = {0: {"exp_avg": torch.ones(2)}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RunsCode(), "ran_code"),
        ({"model": {"w": torch.ones(2)}, "args": RunsCode()}, "ran_code"),
        ({"w": torch.ones(2), "x": RunsCode()}, "ran_code"),
        ({"model": {"w": torch.ones(1).expand(1 << 40)}}, "repeats its values"),
        ({"model": {"w": torch.ones(2, 2).to_sparse()}}, "'.*file.pt'"),
        ({"model": {"_fsdp_wrapped_module._flat_param": torch.ones(2)}}, "FULL_STATE_DICT"),
        ({"model": {"w": torch.ones(2)}, "x": endless()}, "containers in containers"),
        ({"model": {"w": torch.ones(2)}, "x": bomb()}, "repeats the same values"),
        ([torch.ones(2)], "holds a list"),
        ({"epoch": 3}, "holds no weights: its entries are 'epoch'"),
        ({}, "holds no weights"),
        ({"model": {"w": torch.ones(2)}, "optimizer": {"state": {}}}, "not that of a torch optimizer"),
        ({"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": [{}]}}, "not that of a torch"),
        ({"model": {"w": torch.ones(2)}, "optimizer": {"state": {1: {}}, "param_groups": GROUPS}}, "entry 1"),
        ({"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: 1}, "param_groups": GROUPS}}, "entry 0"),
        ({"model": {"w": torch.ones(2)}, "optimizer": {"state": STATE, "param_groups": GROUPS * 2}}, "two groups"),
        (
            {"model": {"w": torch.ones(3)}, "optimizer": {"state": STATE, "param_groups": GROUPS}},
            r"\[2\], and w has \[3\]",
        ),
        (
            {"model": {"w": torch.ones(2)}, "optimizer": {"state": {"x": {}}, "param_groups": [{"params": ["x"]}]}},
            "'x'",
        ),
    ],
)
def test_what_cannot_be_taken_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        imported(tmp_path, content, ["w"])
    assert RunsCode.ran == 0


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"\x80\x02}q\x00.", b"hello, world"])
def test_files_that_are_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(BadInput, match=r"file\.pt"):
        open_foreign(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("path", "said"),
    [({"model": {}, "optim": {}}, "a dict with 'model', 'optim',"), (torch.nn.Linear(1, 1), "a Linear,")],
)
def test_what_stands_in_place_of_a_path_is_refused_by_what_it_is(path: Any, said: str) -> None:
    with pytest.raises(BadInput, match=rf"is {said} expected the path .*checkpoint.load\(path, model, optimizer\)"):
        open_source(path)


def test_folders_and_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds nothing\. Known are folders of DeepSpeed"):
        open_foreign(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(BadInput, match="holds checkpoint-5"):
        open_foreign(tmp_path)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"is no checkpoint.* Did you mean '.*/run/checkpoints'\?"):
        open_foreign(tmp_path / "run")
    with pytest.raises(BadInput, match="There is no checkpoint"):
        open_foreign(tmp_path / "nothing")
