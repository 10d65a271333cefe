"""A language model that returns the loss when it is called with targets, so that no rank ever has all logits.

The head gets a class of the same name. With targets its forward multiplies and computes the loss chunk by chunk of
tokens; without targets it is unchanged, for generating text and for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from terrazzo.config import Config
from terrazzo.engine import find_units
from terrazzo.errors import BadInput
from terrazzo.marks import Mark
from terrazzo.nn.chunked_cross_entropy import MANY_LOGITS, linear_cross_entropy
from terrazzo.parallel import vocabulary_of
from terrazzo.train.data import IGNORED
from terrazzo.train.model.causal_lm import logits_of
from terrazzo.train.model.decoder import Decoder, TiedHead
from terrazzo.train.model.huggingface import one_sequence_per_row
from terrazzo.train.model.parallel import name_of_head

__all__ = ["TARGETS", "gives_loss", "take_targets", "wants_loss_without_logits", "why_all_logits"]

TARGETS = "targets"
"""The name of the targets among the model's keyword arguments: int64, of the shape of the tokens."""


@dataclass
class _CalledWith:
    """The targets that a model was called with, shared by the model and its head."""

    model: nn.Module
    targets: Tensor | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.targets = kwargs.pop(TARGETS, None)
        return args, kwargs

    def drop(self, model: nn.Module, args: Any, output: Any) -> None:
        self.targets = None

    def loss(self, hidden: Tensor, weight: Tensor) -> Tensor:
        assert self.targets is not None
        if (vocabulary := vocabulary_of(self.model)) is not None:
            return vocabulary.of_hidden(hidden, weight, self.targets)
        return linear_cross_entropy(hidden, weight, self.targets, ignore_index=IGNORED)


_CALLED_WITH = Mark[_CalledWith]("terrazzo_targets")
_ALL_LOGITS = Mark[str]("terrazzo_all_logits")
"""On a model that has to compute all its logits though the run would rather have none: why."""


def wants_loss_without_logits(config: Config, vocabulary: int) -> bool:
    """Whether a run's loss is to be computed without logits, if its model can: `gives_loss` of the model says that.

    Args:
        vocabulary: the number of logits of a token.
    """
    wanted = config.objective.loss
    if config.needs_all_logits:
        return False
    tokens = config.batch.micro_batch * config.batch.sequence_length // config.plan.mesh.cp
    return wanted == "chunked" or (wanted == "auto" and tokens * vocabulary // config.plan.mesh.tp >= MANY_LOGITS)


def take_targets(model: nn.Module, config: Config) -> None:
    """Have `model`, on the meta device and not cut yet, take `targets` if the run's loss is computed without logits.

    Raises:
        BadInput: the configuration asks for that, and the model changes its logits, or has no plain head. A run that
            only prefers it goes on, and `why_all_logits` tells why it has them.
    """
    name = name_of_head(model)
    head = model.get_submodule(name) if name else None
    if not wants_loss_without_logits(config, _vocabulary(model, head)):
        return
    if head is None or (obstacle := _unlike_plain(model, head)):
        why = f"a {type(model).__name__} {_CHANGED if head is None else obstacle}"
        if config.objective.loss == "chunked":
            raise BadInput(f"objective.loss is 'chunked', but {why}: set objective.loss to 'auto' or 'full'.")
        _ALL_LOGITS.leave(model, why)
        return
    passed = _CalledWith(model)
    for module in (model, head):
        _CALLED_WITH.leave(module, passed)
    head.__class__ = _with_loss(type(head))
    model.register_forward_pre_hook(passed.take, with_kwargs=True)
    model.register_forward_hook(passed.drop, always_call=True)


def gives_loss(model: nn.Module) -> bool:
    """Whether `model` returns the loss when it is called with targets."""
    return _CALLED_WITH.find(model) is not None


def why_all_logits(model: nn.Module) -> str | None:
    """Why `model` computes all its logits though a loss without them would take less memory; None if it would not."""
    return _ALL_LOGITS.find(model)


def _vocabulary(model: nn.Module, head: nn.Module | None) -> int:
    return model.config.vocab_size if isinstance(model, Decoder) else int(getattr(head, "out_features", 0))


_CHANGED = "does not return what one matrix without a bias makes of its last hidden states"


def _unlike_plain(model: nn.Module, head: nn.Module) -> str:
    """Why the model's logits are not the output of its head, a product with one matrix; empty if they are.

    Runs the model on meta, in bf16: kernels for the experts of a mixture take nothing wider.
    """
    if isinstance(head, TiedHead):
        return ""
    matrix: Any = head
    if not isinstance(head, nn.Linear) or matrix.bias is not None or type(matrix).forward is not nn.Linear.forward:
        return _CHANGED
    if isinstance(model, Decoder):
        return ""
    outputs: list[Any] = []
    handle = head.register_forward_hook(lambda module, args, output: outputs.append(output))
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), one_sequence_per_row(), _one_block_for_all(model) as idle:
            used = ((name, each) for name, each in model.named_parameters() if not name.startswith(idle))
            weights = {name: parameter.bfloat16() for name, parameter in used}
            logits = logits_of(functional_call(model, weights, kwargs={"input_ids": tokens}))
    except Exception as error:  # anything: a stranger's forward has been given tensors without values
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return f"cannot be run without values, to see what it does to its logits ({reason})"
    finally:
        handle.remove()
    return "" if len(outputs) == 1 and logits is outputs[0] else _CHANGED


@contextmanager
def _one_block_for_all(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Within this context the first block of each class in a list computes, and the others return what it has returned.

    On meta that has no values, so it is as good; eighty blocks would take seconds, at each start of a run.

    Yields: with what names of parameters of these others begin.
    """
    returned: dict[tuple[str, type[nn.Module]], Any] = {}
    firsts: list[RemovableHandle] = []
    others: dict[str, nn.Module] = {}
    for name in find_units(model, None)[0]:
        parent, block = name.rpartition(".")[0], model.get_submodule(name)
        if not isinstance(model.get_submodule(parent), nn.ModuleList) or "forward" in vars(block):
            continue
        kind = parent, type(block)
        if kind in returned:
            vars(block)["forward"] = lambda *args, kind=kind, **kwargs: returned[kind]
            others[f"{name}."] = block
        else:
            returned[kind] = None
            firsts.append(block.register_forward_hook(partial(_keep_output, returned, kind)))
    try:
        yield tuple(others)
    finally:
        for first in firsts:
            first.remove()
        for block in others.values():
            del vars(block)["forward"]


def _keep_output(returned: dict[Any, Any], kind: object, block: nn.Module, args: Any, output: Any) -> None:
    returned[kind] = output


def _with_loss(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name, by which units and styles are found."""

    def forward(self: nn.Module, hidden: Tensor, *weight: Tensor) -> Tensor:
        passed = _CALLED_WITH.find(self)
        if passed is None or passed.targets is None:
            logits: Tensor = kind.forward(self, hidden, *weight)
            return logits
        return passed.loss(hidden, weight[0] if weight else self.weight)  # type: ignore[arg-type]

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward})
