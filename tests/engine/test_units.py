"""Which modules become units, which unit owns a parameter, and parameters of every awkward kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, compile_units, engine_of
from terrazzo.engine.unit_forwards.layered_forward import layers_of
from tests.engine.toys import (
    EVERY_PLAN,
    TABLE_1D,
    Block,
    Net,
    adamw,
    assert_close,
    batch,
    full_parameters,
    loss_of,
    mesh_for,
    on_ranks,
    sharded,
    train,
    train_alone,
)
from tests.helpers.cover import places
from tests.helpers.fake import fake_group


def unit_names(model: nn.Module, units: Any = None) -> list[str]:
    with fake_group(2):
        sharded_model, _ = tz.shard(model, None, "zero3", units=units)
        return [unit.name for unit in engine_of(sharded_model).units]


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]


# -- discovery -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "units",
    [
        None,
        Block,
        "Block",
        "blocks.*",
        [Block],
        ["Block"],
        ["blocks.*"],
        ["blocks.?"],
        ["blocks.0", "blocks.[12]"],
    ],
)
def test_blocks_are_found(units: Any) -> None:
    assert unit_names(Net(), units) == BLOCKS


@pytest.mark.parametrize(
    ("units", "names"),
    [
        (["embed"], ["", "embed"]),
        ([nn.Embedding, "blocks.1"], ["", "embed", "blocks.1"]),
        ([nn.Linear], ["", *(f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")), "head"]),
        (["blocks.*.up"], ["", "blocks.0.up", "blocks.1.up", "blocks.2.up"]),
    ],
)
def test_units_are_what_was_asked_for(units: Any, names: list[str]) -> None:
    assert unit_names(Net(), units) == names


def test_a_glob_star_stays_within_one_level() -> None:
    assert unit_names(Net(), ["blocks.*"]) == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_blocks_stand_for_a_container_that_a_glob_finds_among_others() -> None:
    """A ModuleList is never called, so nothing would gather it."""
    assert unit_names(Net(), ["*"]) == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_the_models_own_list_comes_first() -> None:
    class Declared(Net):
        _no_split_modules = ["Linear"]

    assert "blocks.0.up" in unit_names(Declared())


def test_the_heaviest_repeated_class_is_chosen() -> None:
    model = Net()
    model.small = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(9))
    assert unit_names(model) == BLOCKS


def test_encoder_and_decoder_layers_are_all_units() -> None:
    layers = [f"{part}.layers.{index}" for part in ("encoder", "decoder") for index in range(2)]
    assert unit_names(nn.Transformer(8, 2, 2, 2, 16, batch_first=True)) == ["", *layers]


class Mixer(nn.Sequential):
    """A second class of layers."""


def mixed(width: int = 13) -> nn.Module:
    """Layers of two classes in turn; those of one weigh less together than one of the other does."""
    model = Net(width, 0)
    for _ in range(2):
        model.blocks.extend([Mixer(nn.LayerNorm(width)), Block(width), Block(width)])
    return model


def test_every_class_that_repeats_in_a_list_is_chosen_and_treated() -> None:
    names = [f"blocks.{index}" for index in range(6)]
    assert unit_names(mixed()) == ["", *names]
    model = mixed()
    checkpoint_activations(model, "full")
    assert [name for name, module in model.named_modules() if layers_of(module)] == names


def test_a_stack_of_blocks_that_does_not_repeat_is_no_unit() -> None:
    model = nn.Sequential(Net(), nn.Sequential(nn.LayerNorm(13), nn.Linear(13, 999)))  # a head, of which none warns
    assert unit_names(model) == ["", *(f"0.{name}" for name in BLOCKS[1:])]


def test_a_models_own_list_is_found_within_a_wrapper() -> None:
    class Declared(Net):
        _no_split_modules = ["Linear"]

    assert "0.blocks.0.up" in unit_names(nn.Sequential(Declared()))


def test_layers_in_the_root_that_outweigh_a_unit_are_named_before_anything_changes() -> None:
    class Declared(Net):
        _no_split_modules = ["Mixer"]

    model = Declared()
    model.blocks.extend([Mixer(nn.LayerNorm(13)) for _ in range(2)])
    with fake_group(2), pytest.raises(UserWarning, match=r"In no unit.*3 layers, 'blocks\.0'.*Mixer.*in units="):
        tz.shard(model, None, "zero3")
    assert unit_names(model, ["blocks.*"]) == ["", *(f"blocks.{index}" for index in range(5))]


def doubled(model: nn.Module) -> nn.Module:
    """Of two equal parts, which hold the blocks of the model in turn."""
    model.blocks = nn.ModuleList(nn.ModuleList([block, Block()]) for block in model.blocks)
    return model


class Attending(nn.Module):
    """Layers that are containers: nobody calls one, but what is in them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 13), nn.Linear(13, 17)
        parts = (Block, lambda: nn.Sequential(nn.Linear(13, 13), nn.ReLU()), lambda: nn.LayerNorm(13))
        self.layers = nn.ModuleList(layer([make() for make in parts]) for _ in range(2))
        self.aside = nn.Sequential(nn.Linear(13, 13))  # of a class of theirs, and not in a layer

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.aside(self.embed(tokens))
        for layer in self.layers:
            for part in layer.children():
                x = part(x)
        return self.head(x)


def in_a_dict(parts: list[nn.Module]) -> nn.Module:
    return nn.ModuleDict(dict(zip(("attention", "rest", "norm"), parts, strict=True)))


LISTED = ["", *(f"layers.{layer}.{part}" for layer in range(2) for part in (0, 1))]
NAMED = ["", *(f"layers.{layer}.{part}" for layer in range(2) for part in ("attention", "rest"))]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: doubled(Net()), ["", *(f"blocks.{i}.{k}" for i in range(3) for k in range(2))]),
        (lambda: Attending(nn.ModuleList), LISTED),
        (lambda: Attending(in_a_dict), NAMED),
        (lambda: Attending(lambda parts: nn.ModuleList([nn.ModuleList(parts[:2]), parts[2]])),
         ["", *(f"layers.{layer}.0.{part}" for layer in range(2) for part in (0, 1))]),
    ],
    ids=["lists of blocks", "layers as lists", "layers as dicts", "deeper"],
)  # fmt: skip
def test_blocks_stand_for_the_containers_around_them(make: Any, names: list[str]) -> None:
    assert unit_names(make()) == names


@pytest.mark.parametrize("layer", [nn.ModuleList, in_a_dict])
def test_layers_that_are_containers_train_as_in_one_process(layer: Any) -> None:
    """And keep to the bill: no part of a layer stays gathered because nobody saw it end."""
    base = Attending(layer)
    alone = copy.deepcopy(base)
    train_alone(alone, adamw(alone.parameters()), 3, 2)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero3")
        train(model, optimizer, 3, rank)
        engine = engine_of(model)
        assert engine.peak_transient_bytes == engine.bill.transient_bytes
        return full_parameters(model)

    assert_close(on_ranks(2, body)[0], dict(alone.named_parameters()))


def test_without_repetition_large_modules_become_units() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(1000, 1001)
            self.small = nn.Linear(10, 10)

    assert unit_names(Plain()) == ["", "large"]


def test_a_unit_may_be_the_whole_model() -> None:
    assert unit_names(nn.Linear(3, 3)) == [""]


def test_the_choice_is_printed() -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), None, "zero3", precision="bf16")
        text = engine_of(model).describe()
    assert "the repeated block Block" in text
    assert all(name in text for name in ("(root)", "blocks.0", "blocks.2"))
    assert all(word in text for word in ("weight", "between", "grad", "optim", "dp_shard 2", "bfloat16", "moments"))


@pytest.mark.parametrize(
    ("unit", "hint"),
    [
        ("Blok", "Did you mean 'Block'"),
        ("layers.*", "matches no module"),
        ("*.up", r"one level of names here: give 'blocks\.\*\.up'"),
    ],
)
def test_a_unit_that_matches_nothing_is_refused(unit: str, hint: str) -> None:
    with fake_group(2), pytest.raises(tz.BadInput, match=hint):
        tz.shard(Net(), None, "zero3", units=[unit])


class Bag(Net):
    """With a container that holds no module."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.ParameterList([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ("layers", r"'layers', a ModuleList, which has no forward.*'layers\.\*\.\*'.*Units are module classes"),
        ("layers.*", r"'layers\.\*' means 'layers\.0', a ModuleDict.*'layers\.0\.\*'"),
        (nn.ModuleDict, r"'ModuleDict' means 'layers\.0'"),
        (["aside", "ModuleList"], "'ModuleList' means 'layers'"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda model, units: tz.shard(model, None, "zero3", units=units),
        lambda model, units: checkpoint_activations(model, "full", units=units),
        lambda model, units: compile_units(model, units=units),
    ],
    ids=["shard", "checkpoint_activations", "compile_units"],
)
def test_a_container_that_is_asked_for_is_refused(use: Any, units: Any, words: str) -> None:
    with fake_group(2), pytest.raises(tz.BadInput, match=words):
        use(Attending(in_a_dict), units)


def test_a_container_without_modules_is_refused() -> None:
    with fake_group(2), pytest.raises(tz.BadInput, match=r"'bag', a ParameterList.*Name the module around it"):
        tz.shard(Bag(), None, "zero3", units="bag")


def test_a_class_that_matches_nothing_is_refused() -> None:
    with fake_group(2), pytest.raises(tz.BadInput, match="LSTM"):
        tz.shard(Net(), None, "zero3", units=[nn.LSTM])


@pytest.mark.parametrize(
    ("units", "words"),
    [(None, "chosen were modules with at least 1,000,000 parameters"), ([], "as asked"), (nn.ReLU, "with parameters")],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda model, units: checkpoint_activations(model, "full", units=units),
        lambda model, units: checkpoint_activations(model, "full", units=units, offload=True),
        lambda model, units: compile_units(model, units=units),
    ],
    ids=["checkpoint_activations", "offload", "compile_units"],
)
def test_what_treats_units_refuses_a_model_without_any(use: Any, units: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(tz.BadInput, match=rf"{words}.*in units, or.*Sequential\._no_split_modules"):
        use(model, units)
    checkpoint_activations(model, "none", units=units)


# -- ownership -------------------------------------------------------------------------------------------------


def owners(model: nn.Module) -> dict[str, str]:
    """For every name of every parameter, the unit that owns it."""
    return {
        name: unit.name
        for unit in engine_of(model).units
        for b in unit.buckets
        for slot in b.slots
        for name in slot.names
    }


class Tree(nn.Module):
    """Units around units: `outer.0` and `outer.1` each hold two blocks and a linear layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 13)
        self.outer = nn.ModuleList(Net(13, 2) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for part in self.outer:
            for block in part.blocks:
                x = block(x)
        return self.outer[1].head(x) + 0 * self.outer[0](tokens) + self.outer[1](tokens)


def test_nested_units_own_what_no_inner_unit_owns() -> None:
    with fake_group(2):
        model, _ = tz.shard(Tree(), None, "zero3", units=["outer.*", Block])
        owner = owners(model)
    assert owner["embed.weight"] == ""
    assert owner["outer.0.head.weight"] == owner["outer.0.embed.weight"] == "outer.0"
    assert owner["outer.0.blocks.1.up.bias"] == "outer.0.blocks.1"


def test_a_parameter_tied_across_units_goes_to_their_lowest_common_ancestor() -> None:
    base = Tree()
    base.outer[0].blocks[1].up.weight = base.outer[0].blocks[0].up.weight  # within outer.0
    base.outer[1].head.weight = base.embed.weight  # with the root
    base.outer[1].blocks[0].down.weight = base.outer[0].blocks[0].down.weight  # across outer.0 and outer.1
    with fake_group(2):
        model, _ = tz.shard(base, None, "zero3", units=["outer.*", Block])
        owner = owners(model)
    assert owner["outer.0.blocks.1.up.weight"] == owner["outer.0.blocks.0.up.weight"] == "outer.0"
    assert owner["outer.1.head.weight"] == owner["embed.weight"] == ""
    assert owner["outer.1.blocks.0.down.weight"] == owner["outer.0.blocks.0.down.weight"] == ""


class Named(Net):
    """With further paths to a block and to a layer of one, of which the first comes before the list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [*self.blocks]
        del self.blocks
        self.early, self.blocks, self.late = blocks[0], nn.ModuleList([*blocks, blocks[1]]), blocks[2].up

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.early(self.embed(tokens)).mean() + self.late(self.embed(tokens)).mean()


def test_a_module_under_several_names_is_owned_as_under_one() -> None:
    with fake_group(2):
        model, _ = tz.shard(Named(), None, "zero3", units=["blocks.*"])
        owner = owners(model)
    assert {owner[f"{name}.up.weight"] for name in ("early", "blocks.0")} == {"early"}
    assert {owner[f"blocks.{name}.up.weight"] for name in (1, 3)} == {"blocks.1"}
    assert owner["late.weight"] == owner["blocks.2.up.weight"] == "blocks.2"


def test_what_two_units_hold_is_the_roots_and_a_unit_left_without_is_named() -> None:
    base = Net()
    base.blocks[2].down = base.blocks[0].down
    base.blocks[1].up.weight, base.blocks[1].up.bias = base.blocks[0].up.weight, base.blocks[0].up.bias
    base.blocks[1].down.weight, base.blocks[1].down.bias = base.blocks[0].down.weight, base.blocks[0].down.bias
    with fake_group(2), pytest.warns(UserWarning, match=r"2 units own no parameter.*'blocks\.0', 'blocks\.1'"):
        model, _ = tz.shard(base, None, "zero3", units=[Block])
    assert {*owners(model).values()} == {"", "blocks.2"}


# -- training awkward models as plain PyTorch does -------------------------------------------------------------


def same_as_alone(base: nn.Module, plan: str, world_size: int = 2, steps: int = 3, units: Any = None) -> None:
    """Losses and parameters after `steps` equal those of one process, tied names and frozen ones included."""
    alone = copy.deepcopy(base)
    wanted = train_alone(alone, adamw([p for p in alone.parameters() if p.requires_grad]), steps, world_size)

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model = copy.deepcopy(base)
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        model, optimizer = tz.shard(model, optimizer, plan, units=units, mesh=mesh_for(plan, world_size))
        return train(model, optimizer, steps, rank), full_parameters(model)

    for rank, (losses, parameters) in enumerate(on_ranks(world_size, body)):
        assert losses == pytest.approx([each[rank] for each in wanted], abs=1e-5)
        assert_close(parameters, dict(alone.named_parameters(remove_duplicate=False)), 1e-5)


class Gain(Block):
    """A block with a scalar in use, and an empty parameter that is not."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.nothing = nn.Parameter(torch.empty(0))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Odd(Net):
    """Scalar, empty and odd-shaped parameters, in the root and in units."""

    def __init__(self) -> None:
        super().__init__(5, 0)
        self.blocks.extend([Gain(5), Gain(5)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.cube = nn.Parameter(torch.randn(3, 1, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.cube.sum((0, 1)) + self.empty.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _tied() -> nn.Module:
    base = Net()
    base.head.weight = base.embed.weight
    base.blocks[1].up.weight = base.blocks[0].up.weight
    base.blocks[2].down = base.blocks[0].down
    return base


def _shared_block() -> nn.Module:
    base = Net()
    base.blocks[2] = base.blocks[0]
    return base


def _frozen() -> nn.Module:
    base = Net()
    base.embed.requires_grad_(False)
    base.blocks[1].requires_grad_(False)
    base.blocks[0].up.bias.requires_grad_(False)
    return base


class Nested(Tree):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.outer[0](tokens) + self.outer[1](tokens)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("make", [Odd, _tied, _shared_block, Named, _frozen])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_awkward_models_train_as_in_one_process(plan: str, make: Any) -> None:
    same_as_alone(make(), plan, 4)


def _unused_embed(base: Nested) -> Nested:
    base.embed = nn.Embedding(1, 1)
    return base


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", TABLE_1D)
def test_nested_units_train_as_in_one_process(plan: str) -> None:
    same_as_alone(_unused_embed(Nested()), plan, units=["outer.*", Block])


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", TABLE_1D)
def test_more_ranks_than_elements(plan: str) -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(17, 1)
            self.bias = nn.Parameter(torch.zeros(17))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens) + self.bias

    same_as_alone(Tiny(), plan, 8)


@pytest.mark.filterwarnings("ignore:The trainable parameters are in several dtypes:UserWarning")
def test_original_dtypes_may_differ_within_a_unit() -> None:
    """All floating parameters are computed in the precision's dtype; integers keep theirs."""
    base = Net()
    base.blocks[0].up.to(torch.bfloat16)
    base.blocks[1].down.to(torch.float16)
    base.blocks[1].counts = nn.Parameter(torch.arange(7), requires_grad=False)
    rounded = copy.deepcopy(base).float()
    alone = train_alone(rounded, adamw([p for p in rounded.parameters() if p.requires_grad]), 3, 2)

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = sharded(base, "zero3")
        losses = train(model, optimizer, 3, rank)
        return losses, full_parameters(model)

    for rank, (losses, parameters) in enumerate(on_ranks(2, body)):
        assert losses == pytest.approx([each[rank] for each in alone], abs=1e-5)
        assert parameters["blocks.0.up.weight"].dtype == torch.float32
        assert torch.equal(parameters["blocks.1.counts"], torch.arange(7))


def test_every_rank_starts_from_the_first_ranks_values() -> None:
    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = Net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank + 1.0)
        model.register_buffer("seen", torch.tensor([float(rank)]))
        model, _ = tz.shard(model, None, "zero3")
        return full_parameters(model), dict(model.named_buffers())

    for parameters, buffers in on_ranks(3, body):
        assert all(bool((value == 1).all()) for value in parameters.values())
        assert buffers["seen"].item() == 0.0


def test_buffers_stay_whole_and_keep_their_dtype() -> None:
    base = Net()
    base.blocks[0].register_buffer("mean", torch.arange(5.0))
    base.register_buffer("count", torch.tensor(3))
    base.register_buffer("scratch", torch.ones(2), persistent=False)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero3", precision="bf16")
        train(model, optimizer, 1, rank)
        return dict(model.named_buffers())

    for buffers in on_ranks(2, body):
        assert torch.equal(buffers["blocks.0.mean"], torch.arange(5.0))
        assert buffers["count"].item() == 3
        assert buffers["scratch"].dtype == torch.float32


def test_a_non_contiguous_parameter_is_named() -> None:
    base = Net()
    base.head.weight = nn.Parameter(torch.randn(13, 17).t())
    with fake_group(2), pytest.raises(tz.BadInput, match=r"head\.weight.*contiguous"):
        tz.shard(base, None, "zero3")


def test_tied_names_stay_one_object() -> None:
    def body(rank: int) -> bool:
        model, optimizer = sharded(_tied(), "zero3")
        loss_of(model, batch()).backward()
        optimizer.step()
        return model.head.weight is model.embed.weight and model.blocks[2].down is model.blocks[0].down

    assert all(on_ranks(2, body))
