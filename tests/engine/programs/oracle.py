"""A program in one plain process: every rank's data in turn, gradients summed in rank order, stock optimizers.

It imports nothing of the engine. Weights are computed with in the program's dtype and mastered in fp32, cast by hand.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.engine.programs.grammar import Edit, Optim, Program, leaves
from tests.engine.programs.model import Net, When, loss_of, moment_of, tokens_of

MAX_NORM = 0.05
"""Small enough to bind."""
HAND_FACTOR = 0.5

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Result:
    """What a run shows: losses and outputs in evaluation by (rank, step, micro-batch), norms by step, final weights."""

    losses: dict[tuple[int, ...], float] = field(default_factory=dict)
    outputs: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def optimizers_of(program: Program, model: nn.Module) -> list[Optimizer]:
    """The program's optimizers over disjoint parts of the model's trainable parameters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if program.left_out:
        named = [(name, p) for name, p in named if name.startswith("tree.")] or named
    count = len(program.optimizers)
    shares = [[parameter for _, parameter in named[index::count]] for index in range(count)]
    return [make(optim, share) for optim, share in zip(program.optimizers, shares, strict=True) if share]


def make(optim: Optim, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Terms under the roots are large, so that no rounding error of a small gradient becomes a whole step."""
    groups: Any = [{"params": list(parameters[i :: optim.groups])} for i in range(optim.groups)]
    groups = [group for group in groups if group["params"]]
    if len(groups) > 1:
        groups[1]["lr"] = 0.01
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if optim.kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.03, eps=0.05, weight_decay=0.1)
    if optim.kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.05, eps=0.1)
    return torch.optim.RMSprop(groups, lr=0.01, eps=0.1)


def micro_batches(program: Program, rank: int, step: int) -> list[When]:
    return [When(rank, step, micro) for micro in range(program.micro_batches)]


def clip(program: Program, model: nn.Module) -> float | None:
    """Clip by torch over the model's parameters, as a program that knows nothing of ranks does."""
    if program.clip == "torch value":
        nn.utils.clip_grad_value_(model.parameters(), MAX_NORM / 10)
        return None
    if program.clip == "hand":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(HAND_FACTOR)
        return None
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_of(program)).item() if program.clip else None


def norm_of(program: Program) -> float:
    return program.norm_type or float("inf")


def forget(program: Program, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Between steps; gradients add up over steps where they are never forgotten."""
    if program.zero == "model":
        model.zero_grad()
    elif program.zero != "never":
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=program.zero != "zeros")


def edit_weight(program: Program, model: Any, edit: Edit) -> None:
    """One of the changes that a plain loop makes to a weight, outside of any context."""
    up = model.get_submodule(leaf_path(program, edit)).up
    with torch.no_grad():
        if edit.kind == "clamp":
            up.weight.clamp_(-0.1, 0.1)
        elif edit.kind in ("scale", "write"):
            up.weight.mul_(0.5)
        elif edit.kind == "through data":
            up.weight.data.mul_(0.5)
        elif edit.kind == "data":
            up.weight.data = new_value(up.weight)
        elif edit.kind == "replace":
            up.weight = nn.Parameter(new_value(up.weight), requires_grad=up.weight.requires_grad)
        elif edit.kind == "to":
            was = up.weight.dtype
            up.to(torch.float16).to(was)
        elif edit.kind == "freeze":
            up.weight.requires_grad_(False)
        elif edit.kind == "load":
            model.load_state_dict({leaf_path(program, edit) + ".up.weight": new_value(up.weight)}, strict=False)


def leaf_path(program: Program, edit: Edit) -> str:
    found = leaves(program.tree)
    return found[edit.leaf % len(found)][0]


def new_value(parameter: Tensor) -> Tensor:
    return torch.linspace(-0.3, 0.3, parameter.numel(), dtype=parameter.dtype).reshape(parameter.shape)


class Oracle:
    """Runs one program."""

    def __init__(self, program: Program, base: Net) -> None:
        self.program = program
        self.masters = copy.deepcopy(base)
        self.model = copy.deepcopy(base).to(COMPUTE[program.precision])
        self.optimizers = optimizers_of(program, self.masters)
        self.result = Result()

    def run(self) -> Result:
        program = self.program
        self._edit(-1)
        for step in range(program.steps):
            self._beside(step)
            self._backward(step)
            norm = clip(program, self.masters)
            if norm is not None:
                self.result.norms[step] = norm
            for optim, optimizer in zip(program.optimizers, self.optimizers, strict=False):
                if (step + 1) % optim.every == 0:
                    optimizer.step()
            forget(program, self.masters, self.optimizers)
            self._copy_down()
            self._edit(step)
        self.result.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return self.result

    def _backward(self, step: int) -> None:
        """The mean of the ranks' gradients, added to what the masters' `.grad` holds."""
        sums: dict[str, Tensor] = {}
        for rank in range(self.program.world):
            for name, grad in self._gradients_of_rank(rank, step).items():
                sums[name] = sums[name] + grad if name in sums else grad
        for name, master in self.masters.named_parameters():
            if name in sums:
                mean = sums[name] / self.program.world
                master.grad = mean if master.grad is None else master.grad + mean

    def _gradients_of_rank(self, rank: int, step: int) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = {}
        for when in micro_batches(self.program, rank, step):
            loss = loss_of(self.model, self.program, when)
            loss.backward()
            self.result.losses[rank, step, when.micro] = loss.item()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    grads[name] = grads[name] + parameter.grad.float() if name in grads else parameter.grad.float()
                parameter.grad = None
        return grads

    def _beside(self, step: int) -> None:
        """Forwards that belong to no backward."""
        for rank in range(self.program.world if self.program.beside == "evaluate" else 0):
            self.result.outputs[rank, step] = evaluate(self.model, self.program, rank, step)

    def _copy_down(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                parameter.copy_(master)

    def _edit(self, step: int) -> None:
        """Edit the weights that are computed with; masters follow where the value that they round to was changed."""
        edits = [edit for edit in self.program.edits if edit.step == step]
        for edit in edits:
            before = [parameter.detach().clone() for parameter in self.model.parameters()]
            edit_weight(self.program, self.model, edit)
            self._adopt(before)

    def _adopt(self, before: list[Tensor]) -> None:
        pairs = itertools.zip_longest(self.model.parameters(), self.masters.parameters(), before)
        with torch.no_grad():
            for parameter, master, old in pairs:
                master.copy_(torch.where(parameter == old, master, parameter.float()))
                if not parameter.requires_grad:
                    master.requires_grad_(False)


def evaluate(model: Any, program: Program, rank: int, step: int) -> Tensor:
    """The loss, without gradients, of a forward of its own."""
    when = When(rank, step, micro=99)
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, program, when)
    model.train()
    return loss


def discarded(model: Any, program: Program, rank: int, step: int) -> None:
    """A forward with gradients whose backward never comes."""
    when = When(rank, step, micro=98)
    model(tokens_of(program, when), moment_of(program, when))
