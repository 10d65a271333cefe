"""A torch that lacks what the engine needs of it is named as the engine is imported."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from terrazzo.engine.runtime import callers, private_torch


def test_what_is_not_there_is_named_with_the_version_of_torch() -> None:
    with pytest.raises(ImportError, match=rf"'_gone' of torch._C.* torch {re.escape(torch.__version__)} .*2\.11"):
        private_torch.lookup(torch, "_C", "_gone", "more")
    with pytest.raises(ImportError, match=rf"'nobody' in Module\._call_impl.* torch {re.escape(torch.__version__)}"):
        callers._code_of(nn.Module._call_impl, "nobody")


def test_a_step_inside_of_a_step_is_told_from_one_that_is_called_there_of_another() -> None:
    told: list[bool] = []

    class Outer(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            super().step()
            other.step()

    one, other = Outer([nn.Parameter(torch.zeros(1))]), torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for each in (one, other):
        each.register_step_pre_hook(lambda own, *_: told.append(callers.is_inside_own_step(own)))
    one.step()
    assert told == [False, True, False]
