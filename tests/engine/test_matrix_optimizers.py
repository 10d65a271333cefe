"""Muon under every row: bit by bit torch's Muon and AdamW in one process; what it sends and holds, as promised."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.optim.matrices.matrix_steps import dry_run_matrices
from terrazzo.engine.optim.stock.template import matrix_needs
from terrazzo.errors import BadInput
from terrazzo.optim.matrix_selection import HEADS
from tests.engine.offload.runs import MOMENTS, SMALL_BLOCK, assert_reference, on_tiers, plan_id, train
from tests.engine.parity import CUSTOM, Case, assert_parity, axes, run_on_threads
from tests.engine.reference import Step, Trainer
from tests.engine.toys import EVERY_PLAN, Net, assert_equal, batch, full_parameters, loss_of, mesh_for, on_ranks, step
from tests.helpers.cover import mostly_long, places
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(("embed", "head", "lm_head"))


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [p for n, p in named if is_matrix(n, p)], [p for n, p in named if not is_matrix(n, p)]


class Stock:
    """torch's two, stepped one after the other."""

    def __init__(self, model: nn.Module, fused: bool = False, **options: Any) -> None:
        matrices, others = divided(model)
        self.both = [torch.optim.Muon(matrices, **(MUON | options)), torch.optim.AdamW(others, **ADAMW, fused=fused)]

    @property
    def state(self) -> dict[Any, Any]:
        return dict(itertools.chain.from_iterable(each.state.items() for each in self.both))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.both for group in each.param_groups]

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()


def muon(model: nn.Module, **options: Any) -> tz.optim.Muon:
    return tz.optim.Muon(*divided(model), adamw=ADAMW, **(MUON | options))


@contextlib.contextmanager
def updates_like_weights() -> Iterator[None]:
    """Torch's update of a tall matrix is a transposed view, to whose elements it adds bf16 weights one by one.

    Its kernel rounds twice then, and once where the update lies as the weights do. In fp32 that changes no bit.
    """
    plain = _muon._zeropower_via_newtonschulz
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", lambda *args: plain(*args).contiguous())
        yield


@functools.cache
def expected(recipe: Any, options: tuple[tuple[str, Any], ...]) -> list[Step]:
    trainer = Trainer(recipe, lambda model: Stock(model, **dict(options)))  # type: ignore[arg-type, return-value]
    with updates_like_weights() if recipe.precision == "bf16-pure" else contextlib.nullcontext():
        return [trainer.step() for _ in range(recipe.steps)]


ROWS = [
    Case("zero0", 3),
    Case("zero1", 2),
    Case("zero2", 3),
    Case("zero3", 4),
    Case("zero3", 2, precision="bf16"),
    Case("zero3", 3, precision="bf16-pure"),
    Case("zero2", 2, precision="fp16"),
    Case("zero3", 3, variant="unused", steps=4),
    Case("hybrid_shard", 2, 2),
    Case("hfsdp", 2, 2, micro_batches=2),
    Case("hpz", 2, 2, precision="bf16"),
    Case("zero0", 2, 2),
    Case(CUSTOM, 2, 2),
]


@pytest.mark.cover(strength=1, turns=2, case=lambda case: {**axes(case), "kind": (case.precision, case.variant)})
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_every_row_is_bitwise_torchs_muon_and_adamw(case: Case) -> None:
    assert_parity(case, run_on_threads(case, make_optimizer=muon), expected(case.recipe, ()))


@functools.cache
def expected_with_fused_adamw(recipe: Any, in_bf16: bool) -> list[Step]:
    trainer = Trainer(recipe, lambda model: Stock(model, fused=True), padded=True, in_shape=is_matrix)  # type: ignore[arg-type, return-value]
    steps = []
    for _ in range(recipe.steps):
        steps.append(step := trainer.step())
        for state in trainer.optimizer.state.values() if in_bf16 else ():
            state.update({kind: value.bfloat16().float() for kind, value in state.items() if kind != "step"})
        step.states = {k: v.bfloat16() if in_bf16 and k[1] != "step" else v for k, v in step.states.items()}
    return steps


AWAY = [
    (Case("zero3", 3), "cpu", "overlapped"),
    (Case("zero3", 2, precision="bf16"), "nvme-all", "overlapped"),
    (Case("zero1", 2, micro_batches=2), "cpu-all", "backward"),
    (Case("hybrid_shard", 2, 2, precision="bf16"), "all on nvme", "synchronous"),
    (Case("zero3", 3, variant="unused", steps=4), "nvme", "backward"),
    (Case("zero2", 2, precision="fp16"), "optim on cpu", "overlapped"),
    (Case("hfsdp", 2, 2), "shares", "overlapped"),
    (Case("zero3", 2, dtypes=MOMENTS), "optim on nvme", "overlapped"),
]


@pytest.mark.parametrize(
    ("case", "tiers", "mode"),
    mostly_long(AWAY, *AWAY[1:4], AWAY[6]),
    ids=lambda value: plan_id(value) if isinstance(value, Case) else value,
)
def test_away_from_the_device_it_is_bitwise_torchs_too(case: Case, tiers: str, mode: str, tmp_path: Path) -> None:
    moved = on_tiers(case, tiers, tmp_path, mode)
    assert_reference(
        moved, train(moved, make_optimizer=muon), expected_with_fused_adamw(case.recipe, case.dtypes == MOMENTS)
    )


@pytest.mark.parametrize(
    "options",
    [{"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, {"weight_decay": 0.0, "momentum": 0.3}],
    ids=str,
)
def test_settings_are_those_of_torchs(options: dict[str, Any]) -> None:
    case = Case("zero3", 3)
    ranks = run_on_threads(case, make_optimizer=lambda model: muon(model, **options))
    assert_parity(case, ranks, expected(case.recipe, tuple(options.items())))


def sharded_net(plan: str, ranks: int, **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(options.pop("base", None) or Net())
    return tz.shard(model, muon(model), plan, mesh=mesh_for(plan, ranks), **options)


def promised(plan: str, ranks: int, precision: str, base: Net | None, **options: Any) -> list[Any]:
    """After two steps: what was sent and held, beside the promise; what the optimizer keeps, beside the bill."""
    model, optimizer = sharded_net(plan, ranks, precision=precision, base=base, **options)
    engine = engine_of(model)
    step(model, optimizer, loss_of(model, batch()))
    engine.traffic.reset()
    ledger, apart = engine.tally.ledger, Tally()
    ledger.peak_bytes = ledger.live_bytes
    loss_of(model, batch()).backward()
    backward_bytes, ledger.peak_bytes = ledger.peak_bytes, ledger.live_bytes
    optimizer.step()
    update_bytes = ledger.peak_bytes - ledger.live_bytes
    ledger.peak_bytes = max(ledger.peak_bytes, backward_bytes)
    wanted, bill = engine.promise.traffic(), engine.bill
    dry_run_matrices(engine.trainable(), matrix_needs(engine.drivers.templates), apart)
    optimizer_bytes = sum(driver.state_bytes() for driver in engine.drivers)
    return [
        (dict(engine.traffic.bytes), dict(wanted.bytes)),
        (engine.traffic.count["all_to_all"], wanted.count["all_to_all"]),
        (engine.peak_transient_bytes, bill.transient_bytes),
        (update_bytes, apart.ledger.peak_bytes),
        (optimizer_bytes, bill.moments_bytes),
        (engine.store.usage()["host_bytes"], bill.host_bytes),
        (engine.store.usage()["disk_bytes"], bill.disk_bytes),
    ]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_what_a_step_sends_and_holds_is_what_was_promised(plan: str, precision: str) -> None:
    base = Net()
    for pairs in on_ranks(4, lambda rank: promised(plan, 4, precision, base)):
        assert all(found == wanted for found, wanted in pairs), pairs


@pytest.mark.parametrize(("plan", "precision"), [("zero3@cpu", "fp32"), ("zero1@nvme-all", "bf16")])
def test_so_it_is_away_from_the_device(plan: str, precision: str, tmp_path: Path) -> None:
    base, offload = Net(), tz.Offload(path=tmp_path, block_mib=SMALL_BLOCK, direct=False)
    used = offload.used_under(tz.Plan.named(plan))
    for pairs in on_ranks(2, lambda rank: promised(plan, 2, precision, base, offload=used)):
        assert all(found == wanted for found, wanted in pairs), pairs


def test_matrices_take_one_moment_in_host_memory_and_files() -> None:
    """Every state of a unit in whole pages: weight, gradient, momentum of matrices, and AdamW's two of the others."""
    with fake_group(2):
        base = Net(width=64, depth=4)
        matrices, others = (sum(p.numel() for p in each) for each in divided(base))
        model, _ = sharded_net("zero3@cpu-all", 2, base=base)
        exact = ((matrices + others) * 8 + matrices * 4 + others * 8) // 2
        assert exact <= engine_of(model).bill.host_bytes < exact + len(engine_of(model).units) * 5 * 4096


def _on_gloo() -> list[Any]:
    torch.manual_seed(1)
    return promised("zero3", 2, "fp32", Net())


@pytest.mark.processes
def test_processes_send_and_hold_it_too(two_processes: Pool) -> None:
    for pairs in two_processes.run(_on_gloo):
        assert all(found == wanted for found, wanted in pairs), pairs


def test_each_rank_sends_of_matrices_two_bytes_there_and_two_back() -> None:
    """Per rank 4 P (D - 1) / D / D on average, with P elements of matrices in all."""
    base, ranks = Net(width=64, depth=4), 4
    matrices = sum(p.numel() for p in divided(base)[0])

    def body(rank: int) -> int:
        model, optimizer = sharded_net("zero3", ranks, base=base)
        step(model, optimizer, loss_of(model, batch()))
        sent: int = engine_of(model).traffic.bytes["all_to_all"]
        return sent

    assert sum(on_ranks(ranks, body)) == pytest.approx(4 * matrices * (ranks - 1) / ranks, rel=0.05)


class Stacked(nn.Module):
    """A stack of matrices, as experts in one tensor are."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, 9, 14))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio->beo", x, self.experts).relu().sum()


def test_a_stack_is_stepped_matrix_by_matrix() -> None:
    base, data = Stacked(), torch.randn(3, 4, 9)
    apart = [nn.Parameter(each.clone()) for each in base.experts.detach()]
    stock = torch.optim.Muon(apart, **MUON)
    for x in data:
        stock.zero_grad()
        torch.einsum("bi,eio->beo", x, torch.stack(apart)).relu().sum().backward()
        stock.step()

    def body(rank: int) -> Tensor:
        own = copy.deepcopy(base)
        model, optimizer = tz.shard(own, tz.optim.Muon(own.parameters(), **MUON), "zero3")
        for x in data:
            step(model, optimizer, model(x))
        return full_parameters(model)["experts"]

    alone = copy.deepcopy(base)
    optimizer = tz.optim.Muon(alone.parameters(), **MUON)
    for x in data:
        step(alone, optimizer, alone(x))
    for found in (alone.experts, *on_ranks(2, body)):
        assert torch.equal(found, torch.stack(apart))


def test_matrices_of_any_memory_format_and_none_at_all_are_stepped() -> None:
    """A convolution's weights in channels_last, against the same in the usual format."""
    torch.manual_seed(1)
    plain = torch.randn(3, 2, 4, 5)
    turned = plain.contiguous(memory_format=torch.channels_last)
    assert not turned.is_contiguous()
    stepped = [torch.nn.Parameter(values) for values in (plain.clone(), turned)]
    empty = torch.nn.Parameter(torch.zeros(0, 4))
    for weight in (*stepped, empty):
        weight.grad = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
    tz.optim.Muon([*stepped, empty], lr=0.1).step()
    assert torch.equal(*stepped)
    assert not torch.equal(stepped[0], plain)


def test_in_plain_pytorch_it_is_torchs_too() -> None:
    base = Net()
    own, stock = copy.deepcopy(base), copy.deepcopy(base)
    optimizers = muon(own), Stock(stock)
    for number in range(3):
        for model, optimizer in zip((own, stock), optimizers, strict=True):
            step(model, optimizer, loss_of(model, batch(number)))  # type: ignore[arg-type]
    assert_equal(dict(own.named_parameters()), dict(stock.named_parameters()))


@pytest.mark.parametrize(("first", "second"), [(("zero3", 4), ("zero1", 2)), (("zero0", 2), ("hfsdp", 4))], ids=str)
def test_a_checkpoint_goes_on_under_another_plan_and_number_of_ranks(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path
) -> None:
    base = Net()
    stock = copy.deepcopy(base)
    plain = Stock(stock)

    def train(plan: str, ranks: int, steps: range, load: bool) -> list[dict[str, Tensor]]:
        def body(rank: int) -> dict[str, Tensor]:
            model, optimizer = sharded_net(plan, ranks, base=base)
            if load:
                tz.checkpoint.load(tmp_path / "a", model, optimizer)
            for number in steps:
                step(model, optimizer, loss_of(model, batch(number)))
            if not load:
                tz.checkpoint.save(tmp_path / "a", model, optimizer)
            return full_parameters(model)

        return on_ranks(ranks, body)

    for number in range(4):
        step(stock, plain, loss_of(stock, batch(number)))  # type: ignore[arg-type]
    train(*first, range(2), load=False)
    for found in train(*second, range(2, 4), load=True):
        assert_equal(found, dict(stock.named_parameters()))


def test_a_checkpoint_goes_on_from_tier_to_tier(tmp_path: Path) -> None:
    """Of matrices alone: AdamW away from the device is the fused one, and on it the plain one."""
    base, data = nn.Sequential(*(nn.Linear(70, 70, bias=False) for _ in range(3))), torch.randn(6, 4, 70)
    stock = copy.deepcopy(base)
    plain = torch.optim.Muon(stock.parameters(), **MUON)
    for x in data:
        step(stock, plain, stock(x).square().mean())

    def train(plan: str, ranks: int, since: int) -> list[dict[str, Tensor]]:
        def body(rank: int) -> dict[str, Tensor]:
            own = copy.deepcopy(base)
            swap = tz.Offload(path=tmp_path, block_mib=SMALL_BLOCK, direct=False).used_under(tz.Plan.named(plan))
            model, optimizer = tz.shard(
                own, tz.optim.Muon(own.parameters(), **MUON), plan, units=[nn.Linear], offload=swap
            )
            if since:
                tz.checkpoint.load(tmp_path / str(since), model, optimizer)
                for kept in optimizer.state_dict()["state"].values():
                    assert kept["momentum_buffer"].abs().sum() > 0
            for x in data[since : since + 2]:
                step(model, optimizer, model(x).square().mean())
            tz.checkpoint.save(tmp_path / str(since + 2), model, optimizer)
            return full_parameters(model)

        return on_ranks(ranks, body)

    train("zero3@cpu", 2, 0)
    train("zero2", 3, 2)
    for found in train("zero3@nvme-all", 2, 4):
        assert_equal(found, dict(stock.named_parameters()))


def test_its_state_dict_is_that_of_the_plain_one() -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = muon(alone)
    step(alone, optimizer, loss_of(alone, batch()))

    def body(rank: int) -> None:
        _, own = sharded_net("zero2", 2, base=base)
        own.load_state_dict(optimizer.state_dict())
        given, found = optimizer.state_dict()["state"], own.state_dict()["state"]
        assert given.keys() == found.keys()
        for key, kinds in given.items():
            assert_equal(found[key], kinds)

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_its_own_state_dict_loaded_in_mid_run_changes_no_bit(plan: str) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    plain = Stock(alone)
    for number in range(4):
        step(alone, plain, loss_of(alone, batch(number)))  # type: ignore[arg-type]

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded_net(plan, 2, base=base)
        for number in range(4):
            step(model, optimizer, loss_of(model, batch(number)))
            optimizer.load_state_dict(optimizer.state_dict())
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_equal(found, dict(alone.named_parameters()))


REFUSED: list[tuple[str, Any, str]] = [
    ("zero3", lambda net: torch.optim.Muon(divided(net)[0]), r"Use tz\.optim\.Muon, .* tz\.optim\.hidden_matrices"),
    ("zero3", lambda net: [tz.optim.Muon([p]) for p in divided(net)[0][:2]], "Use one tz.optim.Muon with several"),
]


@pytest.mark.parametrize(("plan", "make", "words"), REFUSED, ids=["torch's", "two"])
def test_what_cannot_be_is_refused_before_anything_is_changed(plan: str, make: Any, words: str) -> None:
    with fake_group(4):
        model = Net()
        with pytest.raises(BadInput, match=words):
            tz.shard(model, make(model), plan)
        tz.shard(model, muon(model), "zero3")


def test_settings_and_vectors_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"shape \(27,\) among the matrices"):
        tz.optim.Muon([Net().blocks[0].up.bias])
    with pytest.raises(BadInput, match=r"not accept these settings: .*momentum"):
        tz.optim.Muon(divided(Net())[0], momentum=-1.0)
    with pytest.raises(BadInput, match=r"not accept these settings: .*beta"):
        tz.optim.Muon(*divided(Net()), adamw={"beta": 1})
    matrix = Net().blocks[0].up.weight
    with pytest.raises(BadInput, match="a Parameter as matrices: give a list"):
        tz.optim.Muon(matrix)
    for mixed in ([{"params": []}, matrix], [matrix, {"params": []}]):
        with pytest.raises(BadInput, match="in one list of others: put the parameters into a group"):
            tz.optim.Muon([], mixed)


@pytest.mark.parametrize(
    ("algorithm", "settings", "words"),
    [
        ("muon", {"adjust_lr_fn": "match_rms_adam"}, "match_rms_adam is not supported"),
        ("muon", {"ns_steps": -3}, "ns_steps is -3: give"),
        ("muon", {"ns_steps": 5.0}, r"ns_steps is 5\.0"),
        ("muon", {"ns_steps": True}, "ns_steps is True"),
        ("muon", {"ns_coefficients": (3.0, 2.0)}, "ns_coefficients is .*give three"),
        ("muon", {"lr": math.inf}, "lr is inf"),
        ("muon", {"lr": -1.0}, "Learning rate .*-1"),
        ("muon", {"momentum": 7.0}, r"momentum is 7\.0: give"),
        ("adamw", {"betas": (0.9, 1.5)}, r"beta .*1\.5"),
        ("adamw", {"lr": -1.0}, "learning rate.*-1"),
    ],
)
def test_settings_of_a_group_are_refused_too(algorithm: str, settings: dict[str, Any], words: str) -> None:
    matrices, others = divided(Net())
    group = [{"params": matrices if algorithm == "muon" else others, **settings}]
    with pytest.raises(BadInput, match=words):
        tz.optim.Muon(group if algorithm == "muon" else matrices, others if algorithm == "muon" else group)
    optimizer = tz.optim.Muon(matrices)
    with pytest.raises(BadInput, match=words):
        optimizer.add_param_group({"params": others, "algorithm": algorithm, **settings})
    assert len(optimizer.param_groups) == 1


def test_a_momentum_of_bf16_is_not_divided_by_its_norm() -> None:
    """As torch divides its own in place, without Nesterov; with fp32 gradients it divides a copy."""
    kept = []
    for optimizer_class in (torch.optim.Muon, tz.optim.Muon):
        weight = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
        optimizer = optimizer_class([weight], momentum=0.5, nesterov=False)
        weight.grad = torch.full_like(weight, 8.0)
        optimizer.step()
        kept.append(optimizer.state[weight]["momentum_buffer"])
    assert torch.equal(kept[1], torch.full_like(kept[1], 4.0))
    assert float(kept[0].norm()) == pytest.approx(1, rel=0.01)


def test_hidden_matrices_leave_tables_heads_and_vectors_to_adamw() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed.weight = self.head.weight
            self.conv = nn.Conv1d(3, 4, 2)
            self.lm_head = nn.Linear(13, 17, bias=False)

    matrices, others = tz.optim.hidden_matrices(Model())
    assert [name for name, _ in matrices] == [f"blocks.{i}.{way}.weight" for i in range(3) for way in ("up", "down")]
    assert {"embed.weight", "conv.weight", "lm_head.weight", "blocks.0.up.bias"} <= {name for name, _ in others}


def test_a_copied_muon_takes_a_param_group() -> None:
    net = Net()
    optimizer = muon(net)
    for copied in (copy.deepcopy(optimizer), copy.copy(optimizer)):
        copied.add_param_group({"params": [nn.Parameter(torch.ones(3, 5))]})
        assert copied.param_groups[-1]["ns_steps"] == 5


def test_torchs_state_dicts_go_on_in_muon() -> None:
    """The oracle is torch's Muon, which takes the same steps."""
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    theirs, own = torch.optim.Muon([weights[0]], lr=0.05), tz.optim.Muon([weights[1]])
    for t in range(3):
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5 + t).tril()
        theirs.step()
        if t == 0:
            weights[1].data.copy_(weights[0].data)
            own.load_state_dict(theirs.state_dict())
        else:
            own.step()
        assert torch.equal(weights[1], weights[0])
    other = nn.Parameter(torch.ones(3))
    of_adamw = tz.optim.Muon([], [other])
    of_adamw.load_state_dict(torch.optim.AdamW([other]).state_dict())
    assert of_adamw.param_groups[0]["algorithm"] == "adamw"


@pytest.mark.parametrize("key", ["adamw", "muon"])
def test_hidden_matrices_refuses_a_glob_in_place_of_a_list(key: str) -> None:
    with pytest.raises(tz.BadInput, match=rf"{key} is '0\.weight': give a list of globs, \['0\.weight'\]"):
        tz.optim.hidden_matrices(nn.Sequential(nn.Linear(3, 5)), **{key: "0.weight"})


def test_hidden_matrices_calls_heads_so_when_the_default_globs_are_given() -> None:
    model = nn.ModuleDict({"up": nn.Linear(3, 5), "lm_head": nn.Linear(5, 7, bias=False)})
    for globs in (HEADS, list(HEADS)):
        assert tz.optim.hidden_matrices(model, adamw=globs).reasons["lm_head.weight"] == "heads"
    assert tz.optim.hidden_matrices(model, adamw=["lm_head*"]).reasons["lm_head.weight"] == "named by `adamw`"


def test_hidden_matrices_refuses_a_glob_that_matches_nothing() -> None:
    model = nn.ModuleDict({"up": nn.Linear(3, 5), "lm_head": nn.Linear(5, 7, bias=False)})
    with pytest.raises(tz.BadInput, match=r"adamw has 'lm_haed\*', which no trainable parameter's name matches"):
        tz.optim.hidden_matrices(model, adamw=["lm_haed*"])


def test_hidden_matrices_of_berts_layers_are_muons_whatever_they_are_called() -> None:
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    sizes = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 6}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, tie_word_embeddings=False)
    matrices, others = tz.optim.hidden_matrices(nn.Sequential(transformers.BertForMaskedLM(config)))
    inside = {
        f"0.bert.encoder.layer.{i}.{part}.weight"
        for i in range(2)
        for part in (
            *(f"attention.self.{each}" for each in ("query", "key", "value")),
            *("attention.output.dense", "intermediate.dense", "output.dense"),
        )
    }
    assert {name for name, _ in matrices} == inside | {"0.cls.predictions.transform.dense.weight"}
    assert "0.cls.predictions.decoder.weight" in {name for name, _ in others}


@pytest.mark.parametrize("name", ["output", "model.output", "head", "model.head"])
def test_a_head_that_is_called_output_or_head_is_adamws(name: str) -> None:
    last = name.rpartition(".")[2]
    model = nn.ModuleDict({last: nn.Linear(3, 5), "layer": nn.ModuleDict({last: nn.Linear(3, 3)})})
    whole = nn.ModuleDict({"model": model}) if name.startswith("model") else model
    matrices, _ = tz.optim.hidden_matrices(whole)
    assert [each for each, _ in matrices] == [f"{name.removesuffix(last)}layer.{last}.weight"]


def test_what_no_module_multiplies_with_is_adamws_and_that_is_said() -> None:
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))
    with pytest.warns(UserWarning, match=r"2 parameters .* AdamW steps them: vit.*cls_token, vit.*position_embeddings"):
        found = tz.optim.hidden_matrices(model)
    matrices, others = found
    assert len(matrices) == 2 * 6 and all(parameter.ndim == 2 for _, parameter in matrices)
    assert len(matrices) + len(others) == len(list(model.parameters()))
    assert "vit.layers.*." in str(found).splitlines()[0]
    assert {"convolutions", "heads"} <= set(found.reasons.values())


class Mixed(nn.Module):
    """Products that are no linear layer's, and what looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mine = nn.Parameter(torch.zeros(7, 4)), nn.Parameter(torch.zeros(4, 4))
        self.attention, self.recurrent = nn.MultiheadAttention(4, 2), nn.GRU(4, 4)
        self.experts = nn.ParameterDict({"up": torch.zeros(3, 4, 8), "bias": torch.zeros(3, 8)})
        self.Router = type("TopRouter", (nn.Module,), {})()
        self.Router.weight = nn.Parameter(torch.zeros(3, 4))
        self.gate = nn.Module()
        self.gate.weight = nn.Parameter(torch.zeros(3, 4))


def test_names_of_ones_own_go_before_kinds() -> None:
    with pytest.warns(UserWarning, match=r"3 parameters .*: table, mine, experts\.bias\."):
        by_kind, _ = tz.optim.hidden_matrices(Mixed())
    weights = {f"recurrent.weight_{way}_l0" for way in ("ih", "hh")}
    products = {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "experts.up",
        "Router.weight",
        "gate.weight",
    } | weights
    assert {name for name, _ in by_kind} == products
    by_name, _ = tz.optim.hidden_matrices(Mixed(), adamw=["table", "*bias*", "experts.*"], muon=["mine"])
    assert {name for name, _ in by_name} == products - {"experts.up"} | {"mine"}
    for glob, words in (("mime", "Did you mean 'mine'"), ("*bias*", "fewer than two dims")):
        with pytest.raises(BadInput, match=words):
            tz.optim.hidden_matrices(Mixed(), muon=[glob])
