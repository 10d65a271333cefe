"""Export to a torch.distributed.checkpoint folder: FSDP2 on two processes reads it back as the plain model it was."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from terrazzo.checkpoint.exporters import dcp as exporter
from terrazzo.checkpoint.exporters.dcp import export_dcp
from terrazzo.checkpoint.importers import open_foreign
from terrazzo.checkpoint.importers.parts.state_dict import StateDictSource
from terrazzo.checkpoint.importers.parts.values import LoadedTensor
from terrazzo.checkpoint.operations.describe import lost
from terrazzo.checkpoint.source import AVERAGE, OptimizerInfo, Source, StateInfo, TensorInfo
from terrazzo.engine.plan.diloco import OUTER_MOMENTUM
from terrazzo.engine.plan.error_feedback import RESIDUAL, RESIDUAL_OF_SUMS
from terrazzo.errors import BadInput, SaveFailed
from tests.helpers.processes import Pool


class Model(nn.Module):
    """Odd sizes, a tie, a frozen layer, a buffer, a parameter of one element, and layers that are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7)
        self.hidden = nn.Linear(7, 5)
        self.out = nn.Linear(5, 7)
        self.late = nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor, late: bool) -> Tensor:
        x = self.frozen(self.embedding(tokens))
        x = x + self.out(torch.relu(self.hidden(x))) * self.gain
        return self.head(self.norm(self.late(x) if late else x))


def built(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Two groups. All hyper-parameters follow `lr`, so that another one's are told apart."""
    decay = [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]
    no_decay = [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decay, "weight_decay": lr}, {"params": no_decay, "lr": lr / 3}]
    return torch.optim.AdamW(groups, lr=lr, betas=(lr * 2, 0.95), eps=lr / 1e4, amsgrad=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, late: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (6,), generator=generator)
    model(tokens, late).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained() -> tuple[Model, torch.optim.AdamW]:
    """The oracle: a plain loop of three steps, in which `late` has no gradient."""
    model = built(seed=1)
    optimizer = adamw(model, lr=0.02)
    for seed in range(3):
        step(model, optimizer, seed, late=False)
    return model, optimizer


class PlainSource(Source):
    """A plain model and its optimizer, as a format that can say all of it would give them."""

    format = "memory"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__("memory")
        self.values: dict[tuple[str, str], Tensor] = {}
        names = {parameter: name for name, parameter in model.named_parameters()}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor in names and names[tensor] != name:
                self.aliases[name] = names[tensor]
            else:
                kind = "weight" if tensor in names else "buffer"
                self.add(name, tensor, {kind: tensor, **optimizer.state.get(tensor, {})})
        groups = []
        for group in optimizer.param_groups:
            plain = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
            for key in ("maximize", "param_names"):  # as from a library that has no such thing
                plain.pop(key, None)
            groups.append(plain | {"params": [names[parameter] for parameter in group["params"]]})
        self.optimizer = OptimizerInfo(type(optimizer).__name__, groups)

    def add(self, name: str, tensor: Tensor, states: dict[str, Tensor]) -> None:
        infos = {kind: StateInfo(value.dtype, value.numel()) for kind, value in states.items()}
        self.tensors[name] = TensorInfo(tuple(tensor.shape), infos)
        self.values |= {(name, kind): value.detach() for kind, value in states.items()}

    def _read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self.values[name, kind].reshape(-1)[start:stop]


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def load_into_fsdp2(folder: Path, names: tuple[str, str], flatten: bool) -> None:
    """What a program that trains with FSDP2 does to resume, and then one step beside the plain model."""
    plain, plain_optimizer = trained()
    model = built(seed=2)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model, lr=0.4)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    nested = {names[0]: of_model} if names[0] else of_model
    dcp.load({**nested, names[1]: of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)

    expected = plain.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(full(value), expected[name]) for name, value in model.state_dict().items())
    parameters = dict(model.named_parameters())
    stateless = []
    for name, parameter in plain.named_parameters():
        state = {key: full(value) for key, value in optimizer.state[parameters[name]].items()}
        if parameter.requires_grad:
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        for key, value in plain_optimizer.state[parameter].items():
            assert state[key].dtype == value.dtype and torch.equal(state[key], value), (name, key)
        if parameter.requires_grad and not plain_optimizer.state[parameter]:
            assert not any(value.any() for value in state.values())
            stateless.append(name)
    assert stateless == ["late.weight", "late.bias"]
    for group, expected_group in zip(optimizer.param_groups, plain_optimizer.param_groups, strict=True):
        for key in expected_group.keys() - {"params"}:
            assert group[key] == expected_group[key] and type(group[key]) is type(expected_group[key]), key

    step(model, optimizer, seed=7, late=True)
    step(plain, plain_optimizer, seed=7, late=True)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), plain.get_parameter(name), rtol=1e-6, atol=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize(("names", "flatten"), [(("model", "optim"), False), (("", "optimizer"), True)])
def test_fsdp2_resumes_as_the_plain_model(
    two_processes: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], flatten: bool
) -> None:
    monkeypatch.setattr(exporter, "PIECE_BYTES", 60)  # two rows of most matrices
    export_dcp(PlainSource(*trained()), tmp_path / "out", names)
    entries = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    prefix = f"{names[0]}." if names[0] else ""
    assert len(entries[f"{prefix}embedding.weight"].chunks) == 6
    two_processes.run(load_into_fsdp2, tmp_path / "out", names, flatten)


def test_equal_content_is_stored_once(tmp_path: Path) -> None:
    tied = PlainSource(*trained())
    export_dcp(tied, tmp_path / "tied")
    stored = dcp.FileSystemReader(tmp_path / "tied").read_metadata().storage_data
    offsets = {(index.fqn, index.offset): info.offset for index, info in stored.items()}
    at = torch.Size([0, 0])
    assert offsets["model.head.weight", at] == offsets["model.embedding.weight", at]
    zeros = [offsets[f"optim.state.{name}.weight.exp_avg", at] for name in ("late", "frozen")]
    assert zeros[0] == zeros[1] != offsets["optim.state.out.weight.exp_avg", at]


def test_a_model_alone_and_states_of_another_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.NAdam(model.parameters())
    model(torch.ones(3)).sum().backward()
    model.bias.grad = None
    optimizer.step()
    source = PlainSource(model, optimizer)
    export_dcp(source, tmp_path / "nadam")
    entries = dcp.FileSystemReader(tmp_path / "nadam").read_metadata().state_dict_metadata
    states = {name: entry.size for name, entry in entries.items() if name.startswith("optim.state")}
    assert states == {  # mu_product does not begin at zero, so the bias is not given any
        "optim.state.weight.step": torch.Size([]),
        "optim.state.weight.mu_product": torch.Size([]),
        "optim.state.weight.exp_avg": torch.Size([2, 3]),
        "optim.state.weight.exp_avg_sq": torch.Size([2, 3]),
    }
    source.optimizer = None
    export_dcp(source, tmp_path / "model")
    entries = dcp.FileSystemReader(tmp_path / "model").read_metadata().state_dict_metadata
    assert entries.keys() == {"model.weight", "model.bias"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AVERAGE, "the average of the weights"),
        (OUTER_MOMENTUM, "the momentum of the outer step"),
        ("momentum_buffer@1", "states of all replicas but the first"),
        (RESIDUAL, "what codes of gradients have lost"),
        (f"{RESIDUAL}@1", "what codes of gradients have lost"),
        (RESIDUAL_OF_SUMS, "what codes of sums of gradients have lost"),
    ],
)
def test_states_that_the_format_does_not_have_are_said_to_be_lost(tmp_path: Path, kind: str, words: str) -> None:
    source = StateDictSource("a checkpoint")
    source.optimizer = OptimizerInfo("SGD", [{"params": ["w"], "lr": 0.1}])
    for each in ("weight", "momentum_buffer"):
        source.add("w", each, LoadedTensor(torch.ones(2, 3), each))
    assert lost(source, "dcp") == [] and lost(source, "hf") == ["the optimizer's state"]
    source.add("w", kind, LoadedTensor(torch.ones(2, 3), kind))
    export_dcp(source, tmp_path / "out")
    assert open_foreign(tmp_path / "out").tensors["w"].states.keys() == {"weight", "momentum_buffer"}
    [line] = lost(source, "dcp")
    assert words in line and lost(source, "terrazzo") == []
    assert lost(source, "hf") == ["the optimizer's state", *([line] if "momentum_buffer" not in kind else [])]


def test_the_loss_scaler_is_said_to_be_lost() -> None:
    source = StateDictSource("a checkpoint")
    source.optimizer = OptimizerInfo("SGD", [], {"scale": 1024.0})
    assert lost(source, "dcp") == ["the counters of the loss scaler"] and lost(source, "terrazzo") == []


def test_pieces_are_stored_alone_and_one_element_is_not_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "PIECE_BYTES", 40_000)
    model = nn.Linear(100, 1000, bias=False)
    export_dcp(PlainSource(model, torch.optim.AdamW(model.parameters())), tmp_path / "large")
    assert 400_000 < (tmp_path / "large" / "__0_0.distcp").stat().st_size < 440_000
    small = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(small.parameters())
    small(torch.ones(1)).backward()
    optimizer.step()
    export_dcp(PlainSource(small, optimizer), tmp_path / "small")
    entries = dcp.FileSystemReader(tmp_path / "small").read_metadata().state_dict_metadata
    assert entries["optim.state.weight.step"].size == torch.Size([])
    assert entries["optim.state.weight.exp_avg"].size == torch.Size([1, 1])


class FullDisk:
    """A file on a disk with room for 50 kB."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        if self.file.tell() + len(data) > 50_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)


@contextlib.contextmanager
def file_on_full_disk(path: Path) -> Iterator[FullDisk]:
    with path.open("xb") as file:
        yield FullDisk(file)


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PlainSource(*trained())
    (tmp_path / "there").touch()
    with pytest.raises(BadInput, match="there' exists already"):
        export_dcp(source, tmp_path / "there")
    monkeypatch.setattr(exporter, "new_file", file_on_full_disk)
    large = nn.Linear(100, 1000)
    with pytest.raises(SaveFailed, match="No space left on device"):
        export_dcp(PlainSource(large, torch.optim.AdamW(large.parameters())), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_room_is_asked_for_what_is_written(tmp_path: Path) -> None:
    """Residuals of codes, an average and the like are left behind: no disk would have room for these."""
    source = PlainSource(*trained())
    left = {kind: StateInfo(torch.bfloat16, 10**15) for kind in ("error_feedback", "error_feedback@1", "average")}
    source.tensors = {name: TensorInfo(info.shape, {**info.states, **left}) for name, info in source.tensors.items()}
    export_dcp(source, tmp_path / "out")
