"""`terrazzo.fully_shard` against torch's own, call by call, on two gloo ranks; and against one process."""

from __future__ import annotations

import contextlib
import copy
import runpy
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import terrazzo as tz
from terrazzo.engine import engine_of, is_sharded
from terrazzo.integrations.fsdp2 import register_fsdp_forward_method, units
from terrazzo.integrations.fsdp2.requested import _reshard
from terrazzo.integrations.shared import first_rank
from tests.helpers.cover import mostly_long
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

Apply = Callable[..., Any]
Run = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.layers[0](self.embed(x))


def marked(apply: Apply, model: Net, **options: Any) -> Net:
    for layer in model.layers:
        apply(layer, **options)
    apply(model, **options)
    return model


def batches(count: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.sum(1, keepdim=True)).square().mean()


def loop(model: Net, micro_batches: int = 1, norm_type: float = 2.0, method: str = "set_requires_gradient_sync") -> Run:
    """A user's loop on FSDP2, as it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data, run = iter(batches(5 * micro_batches, dist.get_rank())), []
    for _ in range(5):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            if micro_batches > 1:
                getattr(model, method)(micro_batch == micro_batches - 1)
            loss = loss_of(model, next(data)) / micro_batches
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        optimizer.step()
        scheduler.step()
        run.append((loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
    return run


def alone(ranks: int, micro_batches: int = 1) -> list[float]:
    """The mean loss over ranks of each step's last micro-batch, in one process without any sharding."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = [iter(batches(5 * micro_batches, rank)) for rank in range(ranks)]
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            means = [loss_of(model, next(own)) / micro_batches for own in data]
            (sum(means) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(sum(mean.item() for mean in means) / ranks)
    return losses


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "replicas": {"mesh": (2, 1)},
    "one replica": {"mesh": (1, 2)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bf16 on the wire": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def options_of(name: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    shape = options.pop("mesh", (dist.get_world_size(),))
    names = ("dp_replicate", "dp_shard") if len(shape) == 2 else ("dp",)
    return {**options, "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}


def run_loop(apply: Apply, name: str, *arguments: Any) -> Run:
    torch.manual_seed(0)
    return loop(marked(apply, Net(), **options_of(name)), *arguments)


def against_torch(name: str, *arguments: Any) -> tuple[Run, Run]:
    return run_loop(torch_fully_shard, name, *arguments), run_loop(tz.fully_shard, name, *arguments)


# What two bf16 roundings of a gradient on the wire may do to a norm; everything else differs by roundings in fp32.
WIRE = 2e-2


def assert_close(ours: Run, theirs: Run, relative: float = 2e-6) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=relative, atol=1e-7)


@pytest.mark.processes
@pytest.mark.parametrize("name", mostly_long(OPTIONS, "replicas", "bf16 on the wire"))
def test_a_loop_gives_the_losses_and_norms_of_torchs_own(name: str, two_processes: Pool) -> None:
    for theirs, ours in two_processes.run(against_torch, name, 2):
        assert_close(ours, theirs, WIRE if name == "bf16 on the wire" else 2e-6)


@pytest.mark.processes
def test_a_loop_gives_the_losses_of_one_process(two_processes: Pool) -> None:
    for micro_batches in (1, 3):
        runs = two_processes.run(run_loop, tz.fully_shard, "defaults", micro_batches)
        ours = [sum(loss for loss, _ in step) / 2 for step in zip(*runs, strict=True)]
        assert ours == pytest.approx(alone(2, micro_batches), rel=2e-6)


@pytest.mark.processes
def test_other_norms_and_partial_reductions(two_processes: Pool) -> None:
    for theirs, ours in two_processes.run(against_torch, "defaults", 1, 1.0):
        assert_close(ours, theirs)
    for theirs, ours in two_processes.run(against_torch, "one replica", 2, 2.0, "set_requires_all_reduce"):
        assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "reshard", "plan", "sizes"),
    [
        ((4, 2), True, "hybrid_shard", {"dp_replicate": 4, "dp_shard": 2}),
        ((4, 2), False, "hybrid_shard_zero2", {"dp_replicate": 4, "dp_shard": 2}),
        ((8,), 2, "hpz", {"dp_replicate": 4, "dp_shard": 2}),
        ((8,), 8, "zero3", {"dp_shard": 8}),
        ((8,), False, "shard_grad_op", {"dp_shard": 8}),
    ],
)
def test_arguments_choose_a_row_of_the_table(
    shape: tuple[int, ...], reshard: bool | int, plan: str, sizes: dict[str, int]
) -> None:
    with fake_group(8):
        names = ("outer", "inner") if len(shape) == 2 else None
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        engine = engine_of(marked(tz.fully_shard, Net(), mesh=mesh, reshard_after_forward=reshard))
    assert engine.plan.places() == tz.Plan.named(plan).resolve(engine.axes.data).places()
    assert {axis: engine.axes.size([axis]) for axis in engine.axes.data} == sizes


def test_arguments_without_a_row_are_refused_or_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rank, "_WARNED", set())
    with fake_group(8):
        with pytest.raises(tz.BadInput, match="fully_shard cannot be honoured: reshard_after_forward is 3: "):
            engine_of(marked(tz.fully_shard, Net(), mesh=init_device_mesh("cpu", (8,)), reshard_after_forward=3))
        mesh = init_device_mesh("cpu", (2, 4))
        with pytest.warns(UserWarning, match="fully_shard: reshard_after_forward: a second group of 2") as caught:
            engine_of(marked(tz.fully_shard, Net(), mesh=mesh, reshard_after_forward=2))
        engine_of(marked(tz.fully_shard, Net(), mesh=mesh, reshard_after_forward=2))
    assert len(caught) == 1


def test_a_number_of_ranks_is_not_taken_for_true() -> None:
    """1 == True, and in a set they are one."""
    for choices in ([True, 1], [1, True]):
        with pytest.raises(tz.BadInput, match="give all units the same"):
            _reshard([*choices])
    assert _reshard([2, 2]) == 2 and _reshard([None, True]) is True


# -- the calls of a module ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(kind: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(kind, match=words):
        yield


def by_hand() -> None:
    model = marked(tz.fully_shard, Net())
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    x = batches(1, 0)[0]
    expected = Net().eval()
    expected.load_state_dict(whole)
    assert model.set_requires_gradient_sync(True) is None  # asking for its engine shards it
    layer = model.layers[1]
    with refused(tz.Misuse, "sharded over ranks"):
        layer.up.weight.tolist()
    handle = layer.unshard(async_op=True)
    handle.wait()
    assert torch.equal(layer.up.weight, whole["layers.1.up.weight"])
    layer.reshard()
    with refused(tz.Misuse, "sharded over ranks"):
        layer.up.weight.tolist()
    layer.unshard()
    assert torch.allclose(model(x), expected(x))
    register_fsdp_forward_method(model, "encode")
    assert torch.allclose(model.encode(x), expected.encode(x))
    assert torch.allclose(model(x), expected(x))
    model.load_state_dict(whole)
    with tz.gathered(model) as full:
        assert all(torch.equal(full[name], value) for name, value in whole.items())


@pytest.mark.processes
def test_units_can_be_gathered_by_hand_and_methods_registered(two_processes: Pool) -> None:
    two_processes.run(by_hand)


def scaled(apply: Apply) -> list[float]:
    torch.manual_seed(0)
    model = marked(apply, Net(), mesh=init_device_mesh("cpu", (2,)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if apply is torch_fully_shard:
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide
            module.set_gradient_divide_factor(5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in batches(3, dist.get_rank()):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.processes
def test_gradients_are_divided_by_another_number(two_processes: Pool) -> None:
    for theirs, ours in zip(
        two_processes.run(scaled, torch_fully_shard), two_processes.run(scaled, tz.fully_shard), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=2e-6)


def before_the_first_step() -> None:
    """Gradients of a backward that no step follows are dropped by an optimizer that has not stepped yet."""
    torch.manual_seed(0)
    runs = []
    for tries in (0, 1):
        torch.manual_seed(0)
        model = marked(tz.fully_shard, Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = batches(2, dist.get_rank())
        for _ in range(tries):
            loss_of(model, x[1]).backward()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model, x[0]).backward()
        optimizer.step()
        runs.append(loss_of(model, x[0]).item())
    assert runs[0] == runs[1]
    grad = model.head.weight.grad
    assert grad.shape == model.head.weight.shape
    with refused(tz.Misuse, "gradient of a sharded model"):
        grad.tolist()


@pytest.mark.processes
def test_gradients_can_be_dropped_before_the_optimizer_is_known(two_processes: Pool) -> None:
    two_processes.run(before_the_first_step)


def looked_at() -> None:
    torch.manual_seed(0)
    model, reference = marked(tz.fully_shard, Net()), Net()
    with tz.gathered(model) as full:
        reference.load_state_dict(full)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    x = batches(1, 0)[0]  # the same on both ranks, so that the mean over them is one process's gradient

    def norms(each: nn.Module) -> list[float]:
        return [0.0 if p.grad is None else p.grad.norm().item() for p in each.parameters()]

    for step in range(3):
        for each in (model, reference):
            loss_of(each, x).backward()
            each.head.weight.grad /= 2
            each.head.bias.grad.data.mul_(3.0)
            if step:
                each.layers[1].up.weight.grad = None  # this one alone is left out of the step
        assert norms(model) == pytest.approx(norms(reference), rel=1e-4, abs=1e-6)
        tz.clip_grad_norm_(model, 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert norms(model) == pytest.approx(norms(reference), rel=1e-4, abs=1e-6)
        for optimizer in optimizers:
            optimizer.step()
        with refused(tz.Misuse, "measured as a whole"):
            model.head.weight.grad.norm(dim=0)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step == 1)
        assert norms(model) == norms(reference)
        assert all((p.grad is None) is (step == 1) for p in reference.head.parameters())
        assert all((p.grad is None) is (step == 1) for p in model.head.parameters())
    with tz.gathered(model) as full:
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=0, atol=1e-6, msg=name)
    loss_of(model, x).backward()
    block = weakref.ref(model.layers[0])
    del model, each, optimizer, optimizers, full, norms
    assert block() is None, "stand-ins keep the model alive"


@pytest.mark.processes
def test_gradients_can_be_measured_changed_and_left_out(two_processes: Pool) -> None:
    two_processes.run(looked_at)


def deferred() -> None:
    for materialized in (False, True):
        with torch.device("meta"):
            model = marked(tz.fully_shard, Net())
        if materialized:
            model.to_empty(device="cpu")
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        else:
            tz.accumulate(model).__enter__()  # anything that needs the engine gives values, unit by unit
            units.set_reduces(engine_of(model), True, each=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = loss_of(model, batches(1, 0)[0])
        before.backward()
        optimizer.step()
        assert loss_of(model, batches(1, 0)[0]) < before
    with torch.device("meta"):
        model = marked(tz.fully_shard, Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batches(1, 0)[0]).backward()
    with refused(tz.Misuse, "meta device"):
        optimizer.step()


@pytest.mark.processes
def test_a_model_on_the_meta_device(two_processes: Pool) -> None:
    two_processes.run(deferred)


def resumed(folder: str) -> None:
    torch.manual_seed(0)
    first = marked(tz.fully_shard, Net())
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    data = batches(4, dist.get_rank())
    for x in data[:2]:
        loss_of(first, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    tz.checkpoint.save(folder, first, optimizer, {"step": 2})
    second = marked(tz.fully_shard, Net())
    other = tz.attach(second, torch.optim.AdamW(second.parameters(), lr=1.0))
    assert tz.checkpoint.load(folder, second, other) == {"step": 2}
    for x in data[2:]:
        losses = [loss_of(model, x) for model in (first, second)]
        assert losses[0].item() == losses[1].item()
        for loss, stepped in zip(losses, (optimizer, other), strict=True):
            loss.backward()
            stepped.step()
            stepped.zero_grad()


@pytest.mark.processes
def test_resuming_is_exact(tmp_path: Path, two_processes: Pool) -> None:
    two_processes.run(resumed, str(tmp_path / "checkpoint"))


# -- what is refused -------------------------------------------------------------------------------------------------


def wrong_orders() -> None:
    x = batches(1, 0)[0]
    model = Net()
    for layer in model.layers:
        tz.fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    with refused(tz.Misuse, r"fully_shard\(model\)"):
        optimizer.step()  # the model itself has been forgotten
    twins = [tz.fully_shard(Block(4)) for _ in range(2)]  # of one class, and each a model of its own
    assert [twin(x).shape for twin in twins] == [x.shape] * 2
    model = marked(tz.fully_shard, Net())
    model(x)
    with refused(tz.Misuse, "twice"):
        tz.fully_shard(model)
    with refused(tz.Misuse, "cannot be deep-copied"):
        copy.deepcopy(model.layers[0])
    for late in (nn.Sequential(model), model.head):
        with refused(tz.Misuse, "sharded already"):
            tz.fully_shard(late)
    with refused(tz.BadInput, "ModuleList"):
        tz.fully_shard(Net().layers)
    wide = Net(16)
    tz.fully_shard(wide.layers[0])
    assert len(tz.nn.float8(wide).names) == 6
    model = Net()
    tz.fully_shard(model.layers[0])
    assert not is_sharded(model.layers[0])  # and asking has not sharded it: the model is still to come
    with refused(tz.Misuse, "either that, on the model last, or tz.shard"):
        tz.shard(model, None)
    with refused(tz.Misuse, "fully_shard was called on"):
        tz.parallelize(model, tz.mesh(tp=2))
    tz.fully_shard(model)
    assert model(x).shape == (8, 1)
    assert is_sharded(model)
    alone = tz.fully_shard(Net())  # without units: one gather for all
    alone(x)
    assert len(engine_of(alone).units) == 1
    outer = Net()
    tz.fully_shard(outer)
    tz.fully_shard(outer.layers[0])  # the model first, then a block: the block is a unit all the same
    outer(x)
    assert [unit.name for unit in engine_of(outer).units] == ["", "layers.0"]


@pytest.mark.processes
def test_wrong_orders_are_told_and_harmless_ones_work(two_processes: Pool) -> None:
    two_processes.run(wrong_orders)


def test_without_a_process_group_it_is_said_with_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = marked(tz.fully_shard, Net())
    with refused(tz.Misuse, "init_process_group"):
        model(torch.ones(2, 4))


def refusals() -> None:
    x = batches(1, 0)[0]
    for words, blocks, options in (
        ("ignored_params", {}, {"ignored_params": {nn.Parameter(torch.ones(1))}}),
        ("mp_policy", {}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
        ("cast_forward_inputs", None, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)}),
        ("a mesh for some parameters", None, {"shard_placement_fn": lambda parameter: (Shard(0), "mesh")}),
        ("divisor of the 2 ranks", None, {"reshard_after_forward": 3, "mesh": init_device_mesh("cpu", (2,))}),
    ):  # fmt: skip
        model = Net()
        for layer in model.layers:
            tz.fully_shard(layer, **(options if blocks is None else blocks))
        tz.fully_shard(model, **options)
        with refused(tz.BadInput, words):
            model(x)
    with refused(tz.BadInput, "mp_policy is 5"):
        tz.fully_shard(Net(), mp_policy=5)
    model = marked(tz.fully_shard, Net())
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with refused(tz.Misuse, "torch's own engine"):
            getattr(model, name)(None)
    with refused(tz.Misuse, "part of the model"):
        model.layers[0].set_requires_gradient_sync(False)
    model.layers[0].set_gradient_divide_factor(3.0)
    with refused(tz.Misuse, "same factor"):
        model(x)


@pytest.mark.processes
def test_what_cannot_be_honoured_is_refused(two_processes: Pool) -> None:
    two_processes.run(refusals)


def two_optimizers() -> None:
    torch.manual_seed(0)
    alone = Net()
    model = marked(tz.fully_shard, copy.deepcopy(alone))
    for each in (model, alone):
        halves = [torch.optim.SGD(each.layers.parameters(), lr=0.1), torch.optim.SGD(each.head.parameters(), lr=0.2)]
        loss_of(each, batches(1, 0)[0]).backward()
        for half in halves:
            half.step()
    with tz.gathered(model) as parameters:
        for name in ("head.weight", next(name for name in parameters if name.startswith("layers."))):
            torch.testing.assert_close(parameters[name], alone.get_parameter(name))


@pytest.mark.processes
def test_each_of_two_optimizers_steps_its_own(two_processes: Pool) -> None:
    two_processes.run(two_optimizers)


def warned() -> list[str]:
    first_rank._WARNED.clear()
    model = marked(tz.fully_shard, Net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.set_is_last_backward(True)
            model.set_reshard_after_forward(True)
            model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    assert engine_of(model).schedule.prefetch == 2
    return [str(warning.message).partition(" ")[0] for warning in caught]


@pytest.mark.processes
def test_what_has_no_effect_is_said_once(two_processes: Pool) -> None:
    assert two_processes.run(warned) == [["set_is_last_backward", "set_reshard_after_forward"], []]


def placed(dim: int) -> list[str]:
    first_rank._WARNED.clear()
    model = Net()
    for layer in model.layers:
        tz.fully_shard(layer, shard_placement_fn=lambda parameter: Shard(min(dim, parameter.ndim - 1)))
    tz.fully_shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batches(1, 0)[0])
    return [str(warning.message) for warning in caught if "shard_placement_fn" in str(warning.message)]


@pytest.mark.processes
@pytest.mark.parametrize("dim", [0, 1])
def test_another_dim_to_split_is_said_to_have_no_effect(dim: int, two_processes: Pool) -> None:
    said, other = two_processes.run(placed, dim)
    assert bool(said) is (dim == 1)
    assert all("dim 1" in each for each in said)
    assert not other


def example() -> None:
    module = runpy.run_path("examples/integrations/fully_shard_script.py")
    module["train"]()


@pytest.mark.long
@pytest.mark.processes
def test_the_example_runs(two_processes: Pool) -> None:
    two_processes.run(example)
