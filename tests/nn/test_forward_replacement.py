"""Modules that get another forward in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terrazzo.nn.forward_replacement import replace_forward


def doubled(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(self, x)


def test_other_methods_beside_the_same_forward_make_another_class() -> None:
    modules = [nn.Linear(2, 2) for _ in range(4)]
    x = torch.ones(1, 2)
    expected = [2 * module(x) for module in modules]
    one, other = (lambda self: "one"), (lambda self: "other")
    for module, methods in zip(
        modules, ({}, {"extra_repr": one}, {"extra_repr": other}, {"extra_repr": one}), strict=True
    ):
        replace_forward(module, doubled, **methods)
    plain = "in_features=2, out_features=2, bias=True"
    assert [module.extra_repr() for module in modules] == [plain, "one", "other", "one"]
    assert type(modules[1]) is type(modules[3]) and len({type(module) for module in modules}) == 3
    assert all(torch.equal(module(x), each) for module, each in zip(modules, expected, strict=True))
