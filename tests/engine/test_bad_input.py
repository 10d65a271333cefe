"""Input that cannot work: one error on every rank, naming the value and the fix, with nothing changed before it."""

from __future__ import annotations

import copy
import functools
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, compile_units, engine_of, estimate
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.sharding.mesh_checks import check_kind, check_mesh
from terrazzo.engine.sharding.settings_checks import check_graphs, check_precision
from terrazzo.engine.unit_forwards.layered_forward import layers_of
from tests.engine.toys import Net, adamw, assert_equal, batch, full_parameters, loss_of, on_ranks, sharded, train
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool


def mesh_2d(sizes: tuple[int, int] = (2, 2), names: tuple[str, str] = ("dp_replicate", "dp_shard")) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class Elsewhere(torch.optim.Optimizer):
    """An optimizer that says nothing about how it updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None: ...


def over_other_parameters(model: nn.Module) -> Any:
    return tz.shard(model, adamw(Net().parameters()), "zero3")


def with_adafactor(model: nn.Module) -> Any:
    return tz.shard(model, torch.optim.Adafactor(model.parameters()), "zero3")


def wrapped_in(wrapper: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return lambda m: tz.shard(nn.Sequential(wrapper(m)), None, "zero3")


CASES: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "unknown plan": (lambda m: tz.shard(m, None, "zero33"), ["'zero33'", "Did you mean 'zero3'"]),
    "in DDP": (wrapped_in(DistributedDataParallel), ["'0'", "torch's DistributedDataParallel", "plan='zero0'"]),
    "in DataParallel": (wrapped_in(nn.DataParallel), ["'0'", "torch's DataParallel", "torchrun"]),
    "unknown precision": (lambda m: tz.shard(m, None, precision="fp23"), ["'fp23'", "Did you mean"]),
    "prefix rule": (
        lambda m: tz.shard(m, None, tz.Plan(weight="R", between="R", grad="R", optim="S,R"), mesh=mesh_2d()),
        ["weight", "dp_replicate", "optim", "prefix"],
    ),
    "between not a prefix of weight": (
        lambda m: tz.shard(m, None, tz.Plan(weight="S", between="S,R", grad="S", optim="S,R"), mesh=mesh_2d()),
        ["between", "weight", "prefix"],
    ),
    "hybrid plan on one axis": (
        lambda m: tz.shard(m, None, "hybrid_shard"),
        ["hybrid_shard", "dp_replicate", "dp_shard", "init_device_mesh"],
    ),
    "offload tier": (lambda m: tz.shard(m, None, tz.Plan("D", "D", "D", "D@disk")), ["optim", "'disk'", "device, cpu"]),
    "offload of what is kept": (lambda m: tz.shard(m, None, tz.Plan("D", "D@cpu", "D", "D")), ["between", "'cpu'"]),
    "files without a folder": (lambda m: tz.shard(m, None, "zero3@nvme"), ["nvme", "tz.Offload(path="]),
    "a folder that is not there": (
        lambda m: tz.shard(m, None, "zero3@nvme-all", offload=tz.Offload(path="/nowhere/at/all")),
        ["/nowhere/at/all"],
    ),
    "offload mode": (lambda m: tz.Offload(step="overlaped"), ["'overlaped'", "overlapped"]),  # type: ignore[arg-type]
    "offload block": (lambda m: tz.Offload(block_mib=0.001), ["block_mib", "4 KiB"]),
    "offload block as a switch": (lambda m: tz.Offload(block_mib=True), ["block_mib is True", "such as 4"]),
    "offload block of nothing": (lambda m: tz.Offload(block_mib=1e-9), ["block_mib", "4 KiB"]),
    "offload folder": (lambda m: tz.Offload(path=5), ["path is 5", "a folder"]),  # type: ignore[arg-type]
    "no offload folder": (lambda m: tz.Offload(path=[]), ["path is empty"]),
    "offload switch": (lambda m: tz.Offload(direct="no"), ["direct is 'no'", "True or False"]),  # type: ignore[arg-type]
    "offload as text": (lambda m: tz.shard(m, None, offload="cpu"), ["'cpu'", "tz.Offload", "zero3@cpu"]),  # type: ignore[arg-type]
    "offload depth": (lambda m: tz.Offload(depth=0), ["depth", "from 1"]),
    "fp16 stepped in backward": (
        lambda m: tz.shard(m, None, "zero3@cpu", precision="fp16", offload=tz.Offload(step="backward")),
        ["loss scaling", "overlapped"],
    ),
    "mesh without data axes": (
        lambda m: tz.shard(m, None, mesh=mesh_2d(names=("tp", "pp"))),
        ["tp", "pp", "dp_shard"],
    ),
    "mesh axes without names": (
        lambda m: tz.shard(m, None, mesh=init_device_mesh("cpu", (4,))),
        ["names", "dp_shard"],
    ),
    "mesh that is none": (lambda m: tz.shard(m, None, mesh=3), ["mesh is 3", "tz.mesh"]),  # type: ignore[arg-type]
    "plan without a name": (lambda m: tz.Plan.named(None), ["plan None", "zero3"]),  # type: ignore[arg-type]
    "place without a tier": (lambda m: tz.Place(("D",), None), ["tier is None", "'cpu'"]),  # type: ignore[arg-type]
    "place of a list": (lambda m: tz.Place(["D"]), ["axes are ['D']", "a tuple"]),  # type: ignore[arg-type]
    "tier as a number": (lambda m: tz.Plan.named("zero3").on(weight=3), ["tier is 3", "'cpu'"]),  # type: ignore[arg-type]
    "tier without a name": (
        lambda m: tz.shard(m, None, tz.Plan.named("zero3").on(grad="")),
        ["plan custom: grad: ''", "does not exist"],
    ),
    "checkpointing by number": (lambda m: checkpoint_activations(m, 3), ["3", "selective_half"]),  # type: ignore[arg-type]
    "operators themselves": (
        lambda m: checkpoint_activations(m, "selective", ops=[torch.ops.aten.mm]),
        ["aten.mm", "names such as 'mm'"],
    ),
    "operator as text": (lambda m: checkpoint_activations(m, "selective", ops="mm"), ["ops is 'mm'", "['mm']"]),
    "units checkpointed twice": (
        lambda m: [checkpoint_activations(m, "full") for _ in range(2)],
        ["Block that is checkpointed already", "name other units"],
    ),
    "method by number": (lambda m: tz.register_forward_method(m.blocks[0], 3), ["Block has no method 3"]),  # type: ignore[arg-type]
    "prefetch as text": (lambda m: tz.shard(m, None, prefetch="2"), ["'2'", "an int"]),  # type: ignore[arg-type]
    "negative prefetch": (lambda m: tz.shard(m, None, prefetch=-1), ["-1", "0 or more"]),
    "prefetch as a switch": (lambda m: tz.shard(m, None, prefetch=True), ["True", "an int"]),
    "unit that is none": (lambda m: tz.shard(m, None, units=[m.blocks]), ["ModuleList", "module classes"]),
    "place that is none": (lambda m: tz.Plan("D", "D", None, "D"), ["grad is None", "tz.Place"]),  # type: ignore[arg-type]
    "unit not in the model": (lambda m: tz.shard(m, None, units=["Blick"]), ["'Blick'", "Did you mean 'Block'"]),
    "optimizer over other parameters": (over_other_parameters, ["15 of the optimizer's 15", "model.parameters()"]),
    "adafactor": (with_adafactor, ["Adafactor", "flat shards", "elementwise"]),
    "lbfgs": (lambda m: tz.shard(m, torch.optim.LBFGS(m.parameters()), "zero1"), ["LBFGS", "elementwise"]),
    "muon": (
        lambda m: tz.shard(m, torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]), "zero1"),
        ["torch.optim.Muon", "tz.optim.Muon"],
    ),
    "unknown optimizer": (lambda m: tz.shard(m, Elsewhere(m.parameters())), ["Elsewhere", "elementwise = True"]),
    "not an optimizer": (lambda m: tz.shard(m, lambda p: 3), ["int", "torch.optim.Optimizer"]),
    "no parameters": (lambda m: tz.shard(nn.ReLU(), None), ["ReLU", "no parameters"]),
    "complex parameter": (
        lambda m: tz.shard(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), None),
        ["complex"],
    ),
}


@functools.cache
def never_refused(ranks: int) -> list[list[float]]:
    """Each rank's losses of a model that nothing was tried with: all tests begin with the same seed."""
    torch.manual_seed(0)
    base = Net()
    return on_ranks(ranks, lambda rank: train(*sharded(base, "zero3"), 1, rank))


OF_FOUR = ("prefix rule", "between not a prefix of weight", "mesh without data axes", "mesh axes without names")
"""Cases with a mesh of four ranks."""


@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank_with_the_value_and_the_fix(case: str) -> None:
    attempt, words = CASES[case]
    base, ranks = Net(), 4 if case in OF_FOUR else 2

    def body(rank: int) -> tuple[str, dict[str, Tensor], list[float]]:
        model = copy.deepcopy(base)
        with pytest.raises(tz.BadInput) as caught:
            attempt(model)
        assert type(model) is Net
        unchanged = {name: p.detach().clone() for name, p in model.named_parameters()}
        model, optimizer = tz.shard(model, adamw(model.parameters()), "zero3")  # and it can still be sharded
        return str(caught.value), unchanged, train(model, optimizer, 1, rank)

    start = time.monotonic()
    for (text, unchanged, losses), wanted in zip(on_ranks(ranks, body), never_refused(ranks), strict=True):
        assert all(word in text for word in words), text
        assert "\n" not in text
        assert_equal(unchanged, dict(base.named_parameters()))
        assert losses == wanted
    assert time.monotonic() - start < 60  # nobody waits for a collective's timeout


def compiled_on(model: nn.Module, rank: int, one: int) -> nn.Module:
    if rank == one:
        compile_units(model, backend="eager")
    return model


def one_compiled(model: Net, index: int) -> nn.Module:
    model.blocks[index].compile(backend="eager")
    return model


def with_buffers(model: nn.Module, **sizes: int) -> nn.Module:
    for name, size in sizes.items():
        model.register_buffer(name, torch.zeros(size))
    return model


DIFFERENCES: dict[str, tuple[Callable[[nn.Module, int], Any], str]] = {
    "plan": (lambda m, rank: tz.shard(m, None, "zero3" if rank else "zero1"), "plan"),
    "precision": (lambda m, rank: tz.shard(m, None, precision="bf16" if rank == 2 else "fp32"), "precision"),
    "prefetch": (lambda m, rank: tz.shard(m, None, prefetch=rank), "prefetch"),
    "units": (lambda m, rank: tz.shard(m, None, units=["embed"] if rank else None), "parameters"),
    "frozen": (lambda m, rank: tz.shard(m.requires_grad_(rank != 1), None), "parameters"),
    "shapes": (lambda m, rank: tz.shard(Net(13 + rank), None), "parameters"),
    "shapes of buffers": (lambda m, rank: tz.shard(with_buffers(m, a=3 + rank), None), "buffers"),
    "a buffer on some ranks": (
        lambda m, rank: tz.shard(with_buffers(m, **({"a": 3} if rank else {})), None),
        "buffers",
    ),
    "order of buffers": (
        lambda m, rank: tz.shard(with_buffers(m, **({"a": 3, "b": 3} if rank else {"b": 3, "a": 3})), None),
        "buffers",
    ),
    "compilation": (lambda m, rank: tz.shard(compiled_on(m, rank, 1), None), "compiled units"),
    "compilation of one unit": (lambda m, rank: tz.shard(one_compiled(m, rank % 2), None), "compiled units"),
    "param groups": (
        lambda m, rank: tz.shard(m, adamw(list(m.parameters())[: 15 - rank]), "zero3"),
        "parameters",
    ),
    "decay of an average": (lambda m, rank: tz.EMA(tz.shard(m, None)[0], 0.9 + rank / 100), "decay"),
    "parameters of a later optimizer": (
        lambda m, rank: tz.attach(tz.shard(m, None)[0], adamw(list(m.parameters())[rank:][:3])),
        "parameters",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_arguments_that_differ_between_ranks(what: str) -> None:
    attempt, word = DIFFERENCES[what]

    def body(rank: int) -> str:
        with pytest.raises(tz.BadInput) as caught:
            attempt(Net(), rank)
        return str(caught.value)

    texts = on_ranks(4, body)
    assert len(set(texts)) == 1, "all ranks are told the same"
    assert f"told different things about: {word}. {word}" in texts[0]
    for rank in range(4):
        assert re.search(rf"on ranks? [^;)]*\b{rank}\b", texts[0]), texts[0]


def test_one_parameter_that_differs_is_named_with_the_ranks() -> None:
    def body(rank: int) -> str:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
        model[11].bias.requires_grad_(rank != 1)
        with pytest.raises(tz.BadInput) as caught:
            tz.shard(model, None)
        return str(caught.value)

    for text in on_ranks(3, body):
        assert "['11.bias'].requires_grad (True on ranks 0, 2; False on rank 1)" in text
        assert len(text) < 300


def of_one(model: nn.Module, rank: int) -> Any:
    """An optimizer of the model's parameters, or on rank 1 of another's."""
    return adamw((Net() if rank == 1 else model).parameters())


def failing(parameters: Any) -> Any:
    raise ZeroDivisionError("of the user's own")


ALONE: dict[str, tuple[Callable[[nn.Module, int], Any], str]] = {
    "model": (lambda m, rank: tz.shard(nn.ReLU() if rank == 1 else m), "no parameters"),
    "plan": (lambda m, rank: tz.shard(m, None, "zero33" if rank == 1 else "zero3"), "zero33"),
    "decay": (lambda m, rank: tz.EMA(tz.shard(Net(), None)[0], 1.5 if rank == 1 else 0.9), "decay 1.5"),
    "precision": (lambda m, rank: tz.shard(m, None, precision="fp23" if rank == 1 else "fp32"), "fp23"),
    "prefetch": (lambda m, rank: tz.shard(m, None, prefetch=-1 if rank == 1 else 1), "0 or more"),
    "units": (lambda m, rank: tz.shard(m, None, units=["Blick" if rank == 1 else "Block"]), "Blick"),
    "optimizer": (lambda m, rank: tz.shard(m, of_one(m, rank)), "model.parameters()"),
    "folder": (
        lambda m, rank: tz.shard(m, adamw, "zero3@nvme", offload=tz.Offload(path=None if rank == 1 else ".")),
        "tz.Offload(path=",
    ),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_refuses_all_refuse(what: str) -> None:
    attempt, words = ALONE[what]

    def body(rank: int) -> str:
        model = Net()
        with pytest.raises(tz.BadInput) as caught:
            attempt(model, rank)
        assert type(model) is Net
        return str(caught.value)

    for rank, text in enumerate(on_ranks(3, body)):
        assert words in text if rank == 1 else "Rank 1 cannot do its part" in text, text


def test_an_error_of_the_users_own_on_one_rank_is_raised_there_as_it_is() -> None:
    def body(rank: int) -> list[str]:
        with pytest.raises(ZeroDivisionError if rank == 1 else tz.BadInput) as caught:
            tz.shard(Net(), failing if rank == 1 else adamw)
        return [entry.name for entry in caught.traceback]

    assert on_ranks(2, body)[1][-1] == "failing"


def _disagree() -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(tz.BadInput) as caught:
        tz.shard(Net(), None, ("zero3", "zero2")[dist.get_rank()])
    return str(caught.value), time.monotonic() - start


@pytest.mark.processes
def test_real_ranks_refuse_together_within_seconds(two_processes: Pool) -> None:
    for (text, duration_s), plan in zip(two_processes.run(_disagree), ("zero3", "zero2"), strict=True):
        assert "plan" in text and plan in text
        assert duration_s < 60


@pytest.mark.parametrize(
    ("moments", "master", "said"),
    [
        (
            "fp32",
            "bf16",
            r"moments in fp32 .* master in bf16: .* 4 bytes .* values of 2.* 'bf16', or 'int8'",
        ),
        ("fp64", "fp32", r"moments in fp64 .* Take moments 'fp32' or a master in fp64"),
    ],
)
def test_moments_that_are_wider_than_what_a_step_computes_in_are_warned_of(
    moments: str, master: str, said: str
) -> None:
    precision = tz.Precision(moments=moments, master=master)  # type: ignore[arg-type]
    with fake_group(2):
        model: nn.Module = Net()
        with pytest.warns(UserWarning, match=said):
            estimate(model, adamw(model.parameters()), precision=precision)
        estimate(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)  # which keeps none
        tz.shard(model, None, precision=precision)
        with pytest.warns(UserWarning, match=said):
            tz.attach(model, adamw(model.parameters()))


@pytest.mark.parametrize(
    ("plan", "settings", "said"),
    [
        ("zero3", {"path": "/x", "digest": True}, r"path, digest change nothing under plan zero3: no state is on nvme"),
        ("zero3@cpu", {"path": "/x"}, r"path changes nothing .* Leave it out, or .*'zero3@nvme'"),
        ("zero3", {"step": "backward"}, r"step changes nothing .* on the device.*'zero3@cpu'"),
        (tz.Plan("D@nvme", "D", "D", "D"), {"path": "/x", "threads": 2}, "threads changes nothing"),
        ("zero3", {"pin": False}, "pin changes nothing .* host memory"),
    ],
)
def test_settings_of_offload_that_change_nothing_are_warned_of(
    plan: tz.Plan | str, settings: dict[str, Any], said: str
) -> None:
    offload = tz.Offload(**settings)
    with fake_group(2):
        with pytest.warns(UserWarning, match=said) as caught:
            estimate(Net(), None, plan, offload=offload)
        assert [warning.filename for warning in caught] == [__file__]
        placed = plan if isinstance(plan, tz.Plan) else tz.Plan.named(plan)
        estimate(Net(), None, plan, offload=offload.used_under(placed))  # a warning would be an error


@pytest.mark.parametrize(
    ("ranks", "plan", "settings", "said"),
    [
        (1, "zero3", {"gather": "int8"}, r"tz\.Precision: gather changes nothing under plan zero3: every rank has all"),
        (2, "zero0", {"gather": "int8"}, r"tz\.Precision: gather changes nothing under plan zero0"),
        (
            1,
            "zero0",
            {"quantized_reduce": "int4", "error_feedback": True},
            r"tz\.Precision: quantized_reduce, error_feedback change nothing .* Leave them out\.$",
        ),
        (2, "zero1", {"gather": "int8"}, None),
        (2, "zero0", {"quantized_reduce": "int8"}, None),
    ],
)
def test_formats_of_messages_that_are_not_sent_are_warned_of(
    ranks: int, plan: str, settings: dict[str, Any], said: str | None
) -> None:
    with fake_group(ranks), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimate(Net(), None, plan, precision=tz.Precision(**settings))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (said is not None), texts
    assert said is None or re.search(said, texts[0]), texts


def test_a_model_that_torch_has_divided_is_refused_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
        before = dict(model.named_parameters())
        with pytest.raises(tz.BadInput, match=r"1\.weight.*2\.weight.*DTensors.*tz\.parallelize\(model, mesh, tensor="):
            tz.shard(model, None, "zero3")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_lazy_modules_have_to_have_run() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with fake_group(2):
        with pytest.raises(tz.BadInput, match=r"0\.weight, 0\.bias: of lazy modules.*Run the model once"):
            tz.shard(model, None, "zero3")
        with torch.no_grad():
            model(torch.zeros(1, 5))
        tz.shard(model, None, "zero3")


@pytest.mark.parametrize("local", ["no", 1, 0.0])
def test_where_micro_batches_are_added_is_a_bool(local: Any) -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), None, "zero2")
        with pytest.raises(tz.BadInput, match=rf"local={local!r}\): give True"), tz.accumulate(model, local=local):
            pass


def test_activations_are_checkpointed_before_sharding() -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), None)
        with pytest.raises(tz.Misuse, match=r"after tz\.shard: call it before"):
            checkpoint_activations(model, "full")


def test_layers_of_units_stand_alike_in_whatever_order_they_came() -> None:
    """Copies to the host around the compiled graph, and recomputation in it."""
    one, other = Net(), Net()
    checkpoint_activations(one, "full", offload=True)
    for model in (one, other):
        compile_units(model, backend="eager")
    checkpoint_activations(other, "full", offload=True)
    found = [[type(layer).__name__ for layer in layers_of(model.blocks[0])] for model in (one, other)]
    assert found == [["_Recomputed", "_Compiled", "_Offloaded"]] * 2


def test_layers_are_found_inside_of_what_has_been_wrapped_and_surrounded_since() -> None:
    model = Net()
    checkpoint_activations(model, "full", units=["blocks.0"])
    wrapped = model.blocks[0].forward
    model.blocks[0].forward = functools.wraps(wrapped)(lambda *args: wrapped(*args))
    compile_units(model, backend="eager", units=["blocks.0"])
    assert [type(layer).__name__ for layer in layers_of(model.blocks[0])] == ["_Recomputed", "_Compiled"]
    with pytest.raises(tz.BadInput, match="a Block that is checkpointed already"):
        checkpoint_activations(model, "full")


def test_units_are_compiled_all_or_not_at_all() -> None:
    model = Net()
    checkpoint_activations(model, "full", offload=True)
    wrapped = model.blocks[1].forward
    model.blocks[1].forward = functools.wraps(wrapped)(lambda *args: wrapped(*args))
    before = [block.forward for block in model.blocks]
    with pytest.raises(tz.BadInput, match="has been wrapped since"):
        compile_units(model, backend="eager")
    assert all(block.forward is forward for block, forward in zip(model.blocks, before, strict=True))


def test_without_a_process_group() -> None:
    with pytest.raises(tz.Misuse, match="init_process_group"):
        tz.shard(Net(), None)


def test_a_model_is_sharded_once() -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), None)
        with pytest.raises(tz.Misuse, match="already sharded"):
            tz.shard(model, None)
        with pytest.raises(tz.Misuse, match="already sharded"):
            tz.shard(nn.Sequential(model, nn.Linear(2, 2)), None)


def test_a_parameter_belongs_to_one_sharded_model() -> None:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    second[1].weight = first.weight
    with fake_group(2):
        tz.shard(first, None, "zero0")
        with pytest.raises(tz.Misuse, match=r"1\.weight: parameters of a model that is sharded already"):
            tz.shard(second, None, "zero0")


@pytest.mark.parametrize(
    "use",
    [
        lambda m: tz.clip_grad_norm_(m, 1.0),
        lambda m: tz.gathered(m).__enter__(),
        lambda m: tz.accumulate(m).__enter__(),
        engine_of,
    ],
    ids=["clip", "gathered", "accumulate", "engine_of"],
)
def test_functions_on_a_model_that_is_not_sharded(use: Any) -> None:
    with pytest.raises(tz.Misuse, match=r"Net is not sharded.*tz\.shard"):
        use(Net())


def test_fp16_where_the_device_cannot_compute_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: Any) -> Any:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "linear", unsupported)
    with fake_group(2), pytest.raises(tz.BadInput, match=r"float16.*Half.*bf16"):
        tz.shard(Net(), None, precision="fp16")


def test_a_kind_of_device_that_nobody_has_tried() -> None:
    with pytest.raises(tz.BadInput, match=r"'xpu'.*runs on cpu and cuda"):
        check_kind("xpu")


def test_sums_that_nccl_would_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(2):
        monkeypatch.setattr("terrazzo.engine.sharding.settings_checks.backend_of", lambda group, device: "nccl")
        axes = Axes(init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), Tally())
        check_precision(tz.Precision.named("fp16"), axes)  # which reduces in fp32
        with pytest.raises(tz.BadInput, match=r"reduce='fp16' with NCCL.*Use reduce='fp32'"):
            check_precision(tz.Precision(reduce=torch.float16), axes)


def test_graphs_that_read_weights_where_they_are_no_more() -> None:
    cuda, model = torch.device("cuda", 0), Net()
    block = next(iter(model.children()))
    block.compile(mode="reduce-overhead")
    with fake_group(2):
        tz.shard(model, None, "zero3", units=[type(block)])
        units = engine_of(model).units
        check_graphs(units, torch.device("cpu"))
        with pytest.raises(tz.BadInput, match=r"compiled into CUDA graphs.*zero0"):
            check_graphs(units, cuda)
    for mode in (None, "max-autotune-no-cudagraphs"):
        block.compile(mode=mode)
        check_graphs(units, cuda)


def test_a_process_group_whose_backend_cannot_serve_the_mesh() -> None:
    """The check itself: this machine may have no GPU to build such a mesh on."""
    from types import SimpleNamespace

    with fake_group(2):
        mesh: Any = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        axes: Any = SimpleNamespace(data=("dp_shard",), device=torch.device("cuda", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("terrazzo.engine.sharding.mesh_checks.backend_of", lambda group, device: "gloo")
            with pytest.raises(tz.BadInput, match=r"CUDA.*gloo.*cpu:gloo,cuda:nccl"):
                check_mesh(mesh, axes)
            patch.setattr("terrazzo.engine.sharding.mesh_checks.backend_of", lambda group, device: "nccl")
            axes.device = torch.device("cpu")
            with pytest.raises(tz.BadInput, match=r"CPU.*NCCL"):
                check_mesh(mesh, axes)


# -- wrong moments, in a model that is sharded -----------------------------------------------------------------


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_step_within_accumulate(plan: str) -> None:
    base = Net()

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan)
        with tz.accumulate(model):
            loss_of(model, batch(0, rank)).backward()
            with pytest.raises(tz.Misuse, match=r"tz\.accumulate"):
                optimizer.step()
        with pytest.raises(tz.Misuse, match="accumulate"):
            optimizer.step()
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_equal(found, dict(base.named_parameters()))


def test_a_closure_is_refused() -> None:
    with fake_group(2):
        _model, optimizer = tz.shard(Net(), adamw)
        with pytest.raises(tz.Misuse, match="closure"):
            optimizer.step(lambda: 0.0)


def test_a_changed_requires_grad_is_named_on_the_next_forward() -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), adamw)
        model.blocks[1].up.weight.requires_grad_(False)
        with pytest.raises(tz.Misuse, match=r"blocks\.1\.up\.weight.*requires_grad=True.*False now.*before tz\.shard"):
            model(batch())


@pytest.mark.parametrize("value", [0, -3.0, float("inf"), float("nan"), "3", True, torch.ones(2)])
def test_a_denominator_that_is_not_a_positive_number(value: Any) -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), adamw)
        with pytest.raises(tz.BadInput, match=rf"{re.escape(str(value))}.*one positive"):
            model.set_gradient_denominator(value)


def test_a_denominator_in_a_tensor_is_read_when_it_is_set() -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), adamw)
        tokens = torch.tensor([8])
        model.set_gradient_denominator(tokens)
        tokens.zero_()
        assert engine_of(model).progress.denominator.divisor().product == 8.0


@pytest.mark.parametrize(
    ("max_norm", "norm_type"),
    [
        (-1.0, 2.0),
        (1.0, 0.0),
        (float("nan"), 2.0),
        ("1", 2.0),
        (True, 2.0),
        (1.0, "inf"),
        (torch.ones(2), 2.0),
    ],
)
def test_clipping_by_what_cannot_be_a_norm(max_norm: Any, norm_type: Any) -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), adamw)
        with pytest.raises(tz.BadInput, match="positive"):
            tz.clip_grad_norm_(model, max_norm, norm_type)


def test_clipping_to_nothing_is_that_of_torch() -> None:
    def body(rank: int) -> float:
        model, _ = tz.shard(Net(), adamw, "zero1")
        model(torch.tensor([[1, 2, 3]])).sum().backward()
        tz.clip_grad_norm_(model, 0.0)
        return float(sum(each.grad.abs().sum() for each in model.parameters() if each.grad is not None))

    assert on_ranks(1, body) == [0.0]


def test_an_elementwise_optimizer_may_say_so() -> None:
    class Signed(torch.optim.Optimizer):
        elementwise = True

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, Signed(model.parameters()), "zero3")
        train(model, optimizer, 2, 0)
        return full_parameters(model)

    base = Net()
    alone = copy.deepcopy(base)
    train(alone, Signed(alone.parameters()), 2, 0)
    for found in on_ranks(2, body):
        assert_equal(found, dict(alone.named_parameters()))


def test_errors_are_values_or_runtime_errors_too() -> None:
    """So that code which catches torch's and Python's own kinds still does."""
    assert issubclass(tz.BadInput, ValueError) and issubclass(tz.Misuse, RuntimeError)
    assert issubclass(tz.BadInput, tz.TerrazzoError) and issubclass(tz.Misuse, tz.TerrazzoError)


def test_torchs_own_data_parallelism_around_a_sharded_model_is_refused() -> None:
    with fake_group(1):
        model, _ = tz.shard(Net(), None, "zero3")
        for wrap, named, edit in (
            (DistributedDataParallel, "Remove DistributedDataParallel", "plan='zero0'"),
            (nn.DataParallel, "Remove DataParallel", "torchrun"),
            (lambda inner: DistributedDataParallel(nn.Sequential(inner)), "Remove DistributedDataParallel", "sharded"),
            (fully_shard, "Remove fully_shard", "import fully_shard from terrazzo"),
        ):
            with pytest.raises(tz.Misuse, match=named) as caught:
                wrap(model)
            assert edit in str(caught.value)


def test_a_model_that_torch_shards_is_refused() -> None:
    with fake_group(1):
        model: nn.Module = Net()
        fully_shard(model)
        with pytest.raises(tz.BadInput, match=r"the model has been given to torch's fully_shard.*from terrazzo"):
            tz.shard(model, None, "zero3")
        own: nn.Module = Net()
        tz.fully_shard(own)
        assert own(torch.zeros(2, 4, dtype=torch.long)) is not None, "ours of the same name is another matter"
