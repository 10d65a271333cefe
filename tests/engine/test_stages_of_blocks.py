"""Which modules become units where lists stand in lists, or blocks in a `ModuleDict`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import estimate, find_units
from tests.helpers.fake import fake_group


class Layer(nn.Module):
    """A block as ConvNeXt's: a convolution of each channel, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, groups=width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


def narrowed(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width // 2), nn.Conv2d(width // 2, width, 2))


WIDTHS, DEPTHS = (8, 16, 32, 64), (3, 3, 27, 3)


class Torchvision(nn.Module):
    """Stages of blocks and what is between them in one `Sequential`, as torchvision nests them."""

    def __init__(self, depths: Sequence[int] = DEPTHS) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 4), nn.LayerNorm(8)))
        for width, depth in zip(WIDTHS, depths, strict=False):
            self.features.extend([narrowed(width)] * (width > WIDTHS[0]))
            self.features.append(nn.Sequential(*(Layer(width) for _ in range(depth))))
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Stage(nn.Module):
    """A stage of a class of its own, whose blocks are in a list of some class, as in Swin and timm."""

    def __init__(self, blocks: Iterable[nn.Module], of: Callable[..., nn.Module], *beside: nn.Module) -> None:
        super().__init__()
        self.blocks = of(blocks) if of is nn.ModuleList else of(*blocks)
        self.beside = nn.ModuleList(beside)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Stages(nn.Module):
    def __init__(self, of: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            Stage((Layer(w) for _ in range(n)), of) for w, n in zip(WIDTHS, DEPTHS, strict=True)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x


def in_layers(layers: nn.Module) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.head = nn.Embedding(50, 8), layers, nn.Linear(8, 50)

        def forward(self, x: Tensor) -> Tensor:
            return x

    return Model()


class Residual(nn.Sequential):
    """Around attention and around an MLP: two of one class in one block, which differ."""


def block() -> nn.Module:
    attention = Residual(nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8))
    return nn.Sequential(attention, Residual(nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)))


def layers(count: int) -> list[nn.Module]:
    return [Layer(8) for _ in range(count)]


def normed(count: int) -> list[nn.Module]:
    return [Residual(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(count)]


def numbered(modules: Iterable[nn.Module], prefix: str = "") -> nn.Module:
    return nn.ModuleDict({f"{prefix}{index}": module for index, module in enumerate(modules)})


def under(prefix: str, names: Iterable[Any]) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


def paths(inside: str, depths: Sequence[int] = DEPTHS) -> list[str]:
    return [f"{stage}{inside}.{layer}" for stage, depth in enumerate(depths) for layer in range(depth)]


OF_TORCHVISION = [
    name
    for stage, depth in enumerate(DEPTHS)
    for name in ([f"features.{2 * stage}"] * (stage > 0) + under(f"features.{2 * stage + 1}", range(depth)))
]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Torchvision, ["features.0", *OF_TORCHVISION]),
        (lambda: Stages(nn.ModuleList), under("stages", paths(".blocks"))),
        (lambda: Stages(nn.Sequential), under("stages", paths(".blocks"))),
        (lambda: nn.Sequential(*(nn.Sequential(*layers(6)) for _ in range(2))), paths("", (6, 6))),
    ],
    ids=["torchvision", "a list in a stage", "a sequential in a stage", "a model in two halves"],
)
def test_the_blocks_of_stages_are_units(make: Callable[[], nn.Module], names: list[str]) -> None:
    assert find_units(make(), None)[0] == names


def test_no_stage_is_gathered_whole() -> None:
    """The bill is that of the blocks asked for by their class, or less, where more modules leave the root."""
    with fake_group(8), torch.device("meta"):
        found, asked, whole = (
            estimate(Torchvision(), None, "zero3", units=units).transient_bytes
            for units in (None, [Layer], [f"features.{index}" for index in range(8)])
        )
    assert found <= asked < whole / 2


@pytest.mark.parametrize(
    ("make", "names"),
    [
        # as many stages as the model is deep: each is a small part of it, and a block as good as another
        (lambda: in_layers(nn.ModuleList(nn.Sequential(*layers(2)) for _ in range(20))), under("layers", range(20))),
        (lambda: in_layers(nn.ModuleList(block() for _ in range(2))), under("layers", range(2))),
        # a matrix with its norm is no block
        (lambda: in_layers(nn.ModuleList(nn.Sequential(*normed(3)) for _ in range(2))), under("layers", range(2))),
        # experts: a router has a row for each
        (lambda: in_layers(nn.ModuleList(Stage(layers(4), nn.ModuleList, nn.Linear(8, 4)) for _ in range(2))),
         under("layers", range(2))),
    ],
    ids=["many stages", "sublayers", "matrices", "experts"],
)  # fmt: skip
def test_what_is_no_stage_stays_one_unit(make: Callable[[], nn.Module], names: list[str]) -> None:
    assert find_units(make(), None)[0] == names


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: in_layers(numbered(layers(3))), under("layers", range(3))),
        (lambda: in_layers(numbered(layers(3), "layer_")), under("layers", [f"layer_{index}" for index in range(3)])),
        (lambda: in_layers(numbered(nn.Sequential(*layers(4)) for _ in range(2))), under("layers", paths("", (4, 4)))),
        # of several tasks one may run alone, and of several encoders each has its own blocks
        (lambda: in_layers(nn.ModuleDict({"detect": Layer(8), "segment": Layer(8)})), []),
        (lambda: in_layers(nn.ModuleDict({"key": Stage(layers(2), nn.ModuleList),
                                          "query": Stage(layers(2), nn.ModuleList)})),
         under("layers", itertools.chain(under("key.blocks", range(2)), under("query.blocks", range(2))))),
        (lambda: in_layers(numbered([nn.Linear(8, 8), nn.ReLU()])), []),
    ],
    ids=["numbers", "numbered words", "stages", "tasks", "encoders", "no blocks"],
)  # fmt: skip
def test_a_numbered_dict_is_a_list(make: Callable[[], nn.Module], names: list[str]) -> None:
    assert find_units(make(), None)[0] == names


def test_blocks_of_a_dict_beside_units_are_named_where_they_stay_in_the_root() -> None:
    class Declared(nn.Module):
        _no_split_modules = ["Residual"]

        def __init__(self) -> None:
            super().__init__()
            self.small, self.layers = Residual(nn.Linear(8, 8)), numbered(layers(3))

    with fake_group(2), pytest.raises(UserWarning, match=r"In no unit.*3 layers, 'layers\.0'"):
        tz.shard(Declared(), None, "zero3")


# -- what is said where one unit is most of the model ----------------------------------------------------------


class Deep(nn.Module):
    """Of 6.4 million parameters. Most are in one list, whose modules are too small to be gathered alone; or tables."""

    def __init__(self, layers: nn.Module, *tables: nn.Module) -> None:
        super().__init__()
        self.layers, self.tables = layers, nn.ModuleList(tables)

    def forward(self, x: Tensor) -> Tensor:
        return x


def small_linears(count: int, width: int = 512) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


UNEVEN = lambda: nn.ModuleList([nn.Sequential(*small_linears(22)), nn.Sequential(*small_linears(2))])  # noqa: E731


@pytest.mark.parametrize(
    ("make", "plan", "said"),
    [
        (lambda: Deep(small_linears(24)), "zero3", r"The root holds 100% of the model's.*1,000,000.*units="),
        (lambda: Deep(UNEVEN()), "zero3", r"Unit 'layers\.0', a Sequential, holds 92% .*block Sequential.*units="),
        (lambda: Deep(small_linears(24)), "zero2", None),
        (lambda: Deep(small_linears(15)), "zero3", None),
        (lambda: Deep(nn.ModuleList(), *(nn.Linear(512, 2000, bias=False) for _ in range(6))), "zero3", None),
    ],
    ids=["root", "unit", "whole weights", "small", "large tensors"],
)
def test_one_unit_that_is_most_of_a_model_is_said(make: Callable[[], nn.Module], plan: str, said: str | None) -> None:
    with fake_group(2), torch.device("meta"):
        with contextlib.nullcontext() if said is None else pytest.raises(UserWarning, match=said):
            estimate(make(), None, plan)
        estimate(make(), None, plan, units=["layers.*"] if len(make().layers) else [])  # asked for: not said
