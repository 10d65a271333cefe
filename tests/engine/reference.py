"""The oracle of the parity tests: plain PyTorch in one process, summing in a stated order and casting by hand.

It imports nothing of the engine. For each rank it runs the model on that rank's batches, adds the gradients in the
order that docs/numerics.md promises for the plan, and steps a stock optimizer on whole, named parameters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.engine.models import base_model, batch, criterion, loss_of
from tests.engine.narrow import as_sent, in_blocks

Grads = dict[str, Tensor | None]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CASTS = {  # compute, gradients in sums, master weights
    "fp32": (FP32, FP32, FP32),
    "bf16": (BF16, FP32, FP32),
    "bf16-pure": (BF16, BF16, BF16),
    "fp16": (FP16, FP32, FP32),
}
FIRST_SCALE = 2.0**16


@dataclass(frozen=True)
class Sums:
    """In which order gradients are added.

    Attributes:
        replicas: ranks along the outer axis.
        shards: ranks along the inner one; rank = replica * shards + shard.
        each: axes that every micro-batch is reduced over before it is added to the ones before it: "" (it is added on
            its own rank first), "S" (the inner one) or "SR" (both). The others come once, at the end of the step.
        form: what gradients of matrices are sent as along the outermost axis, `int8` or `int4`; empty: as they are.
        whole: whether all ranks of that axis get the sum, which is sent so, too.
        feedback: what codes lose is added to what is sent next.
    """

    replicas: int
    shards: int
    each: str = ""
    form: str = ""
    whole: bool = False
    feedback: bool = False

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards


@dataclass(frozen=True)
class Recipe:
    """Everything that the reference needs to know of a run.

    Attributes:
        gather: what matrices are sent as, `int8` or `fp8`; empty: in the dtype computed with.
        gathers_frozen: whether those that are not trained are sent as well.
    """

    sums: Sums
    variant: str = "plain"
    precision: str = "fp32"
    micro_batches: int = 1
    steps: int = 3
    denominator: float | None = None
    gather: str = ""
    gathers_frozen: bool = True


@dataclass
class Residuals:
    """What codes of one parameter's gradients have lost: by the rank along the outermost axis, and of the sum (-1).

    Attributes:
        kept: behind the last step that was taken.
        scale: the loss scale of gradients, in none of these.
    """

    kept: dict[int, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    _next: dict[int, Tensor] = field(default_factory=dict)

    def sent(self, place: int, values: Tensor, form: str) -> Tensor:
        """What the codes of `values` and of its residual stand for, in fp32; blocks that are zero stay zero."""
        before = self._next.get(place, self.kept.get(place, torch.zeros_like(values, dtype=torch.float32)))
        blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % 256)).view(-1, 256)
        waiting = (blocks == 0).all(1).repeat_interleave(256)[: values.numel()].view(values.shape)
        total = torch.where(waiting, 0.0, before * self.scale + values.float())
        decoded = as_sent(total, form)
        lost = (total - decoded) / self.scale
        finite = nn.functional.pad(lost.flatten(), (0, -lost.numel() % 256)).view(-1, 256).isfinite().all(1)
        keeps = waiting | ~finite.repeat_interleave(256)[: values.numel()].view(values.shape)
        self._next[place] = torch.where(keeps, before, lost).bfloat16().float()
        return decoded

    def settle(self, taken: bool) -> None:
        if taken:
            self.kept |= self._next
        self._next = {}


@dataclass
class Step:
    """What a step leaves behind: losses by rank and micro-batch; tensors flat, by parameter name (and state).

    Attributes:
        computed: the weights that the next step computes with.
    """

    losses: list[list[float]]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    states: dict[tuple[str, str], Tensor]
    computed: dict[str, Tensor]


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@functools.cache
def reference(recipe: Recipe) -> list[Step]:
    """The recipe's steps under AdamW; computed once for all plans that share it."""
    trainer = Trainer(recipe, lambda model: adamw(model.parameters()))
    return [trainer.step() for _ in range(recipe.steps)]


@dataclass
class Trainer:
    """A single process standing for all ranks. `model` holds the master weights under their own names.

    Attributes:
        after_backward: sees the model with its finished gradients, before each step.
        padded: the optimizer sees each parameter flattened and padded with zeros to a multiple of 64 elements. For
            fused CPU kernels, which round the last elements of a tensor otherwise than those that fill a vector.
        in_shape: by name, those that it sees as they are all the same.
    """

    recipe: Recipe
    make_optimizer: Callable[[nn.Module], Optimizer]
    after_backward: Callable[[nn.Module], Any] = lambda model: None
    padded: bool = False
    in_shape: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False
    steps_done: int = 0
    scale: float = 1.0
    skipped_steps: int = 0
    model: nn.Module = field(init=False)
    optimizer: Optimizer = field(init=False)
    stepped: dict[str, nn.Parameter] = field(init=False)
    residuals: dict[str, Residuals] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compute, self.sum_dtype, master = CASTS[self.recipe.precision]
        self.model = copy.deepcopy(base_model(self.recipe.variant)).to(master)
        self.optimizer = self.make_optimizer(self.model)
        self.stepped = {name: self._stepped(name, p) for name, p in self.model.named_parameters()}
        if self.padded:
            self._hand_over_padded()
        self.scale = FIRST_SCALE if self.recipe.precision == "fp16" else 1.0

    def step(self) -> Step:
        losses, grads = self._gradients()
        for name, parameter in self.model.named_parameters():
            parameter.grad = grads[name]
        self.after_backward(self.model)
        kept = {name: p.grad.flatten().clone() for name, p in self.model.named_parameters() if p.grad is not None}
        taken = all(bool(torch.isfinite(grad).all()) for grad in kept.values())
        for residuals in self.residuals.values():
            residuals.settle(taken)
        if taken:
            self._update()
        else:
            self.skipped_steps += 1
            self.scale /= 2
        self.steps_done += 1
        computed = {name: p.detach().flatten().clone() for name, p in self._twin().named_parameters()}
        return Step(losses, kept, self._weights(), self._states(), computed)

    def _stepped(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer steps: the parameter itself, or a padded one whose memory it becomes a view of."""
        if not self.padded or self.in_shape(name, parameter):
            return parameter
        whole = nn.Parameter(_pad(parameter.detach()))
        parameter.data = whole.detach()[: parameter.numel()].view(parameter.shape)
        return whole

    def _hand_over_padded(self) -> None:
        """Some optimizers keep state from the start: it moves with the parameters."""
        by_parameter = {p: self.stepped[name] for name, p in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                for kind, value in self.optimizer.state.pop(parameter, {}).items():
                    per_element = value.shape == parameter.shape and kind != "step"
                    self.optimizer.state[by_parameter[parameter]][kind] = _pad(value) if per_element else value
            group["params"] = [by_parameter[p] for p in group["params"]]

    def _update(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.stepped[name] is not parameter:
                self.stepped[name].grad = None if parameter.grad is None else _pad(parameter.grad)
        self.optimizer.step()
        for parameter in (*self.model.parameters(), *self.stepped.values()):
            parameter.grad = None

    def _gradients(self) -> tuple[list[list[float]], Grads]:
        recipe, twin = self.recipe, self._twin()
        runs = [
            [self._backward(twin, batch(self.steps_done, rank, micro)) for rank in range(recipe.sums.ranks)]
            for micro in range(recipe.micro_batches)
        ]
        losses = [[runs[m][r][0] for m in range(recipe.micro_batches)] for r in range(recipe.sums.ranks)]
        shapes = {name: p.shape for name, p in twin.named_parameters() if p.requires_grad}
        denominator = (recipe.denominator or float(recipe.sums.ranks)) * self.scale
        grads: Grads = {name: None for name, _ in twin.named_parameters()}
        dtypes = {name: p.dtype for name, p in self.model.named_parameters()}
        for name, shape in shapes.items():
            parts = [[grads_of[name] for _, grads_of in micro] for micro in runs]
            residuals = self._residuals_of(name, shape)
            total = add_up(parts, recipe.sums, torch.zeros(shape, dtype=self.sum_dtype), residuals)
            if total is not None and residuals is not None and recipe.sums.whole:
                grads[name] = (residuals.sent(-1, total, recipe.sums.form).to(total.dtype) / denominator).to(
                    dtypes[name]
                )
            elif total is not None:
                total = total / denominator
                grads[name] = (as_sent(total, recipe.sums.form) if recipe.sums.whole else total).to(dtypes[name])
        return losses, grads

    def _residuals_of(self, name: str, shape: torch.Size) -> Residuals | None:
        if not (self.recipe.sums.feedback and in_blocks(torch.empty(shape, device="meta"))):
            return None
        residuals = self.residuals.setdefault(name, Residuals())
        residuals.scale = self.scale
        return residuals

    def _twin(self) -> nn.Module:
        """The model with the weights that ranks compute with."""
        twin = copy.deepcopy(self.model).to(self.compute)
        for parameter in twin.parameters():
            if parameter.requires_grad or self.recipe.gathers_frozen:
                parameter.data = as_sent(parameter.data, self.recipe.gather)
        return twin

    def backward(self, rank: int, micro: int) -> dict[str, Tensor]:
        """One rank's own gradients of one micro-batch, of parameters that have one; nothing is kept."""
        twin = self._twin()
        _, grads = self._backward(twin, batch(self.steps_done, rank, micro))
        return {name: grad for name, grad in grads.items() if grad is not None}

    def _backward(self, twin: nn.Module, tokens: Tensor) -> tuple[float, Grads]:
        """Loss, and the gradients as autograd leaves them cast to the dtype of sums."""
        if self.recipe.precision == "fp16":
            loss = self._scaled_backward(twin, tokens)
        else:
            loss = loss_of(twin, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        grads: Grads = {}
        for name, parameter in twin.named_parameters():
            grads[name] = None if parameter.grad is None else parameter.grad.to(self.sum_dtype)
            parameter.grad = None
        return loss.item(), grads

    def _scaled_backward(self, twin: nn.Module, tokens: Tensor) -> Tensor:
        output = twin(tokens[:, :-1])
        handed_over = output.detach().float().requires_grad_()
        loss = criterion(handed_over, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        assert handed_over.grad is not None
        output.backward((handed_over.grad * self.scale).to(output.dtype))
        return loss

    def _weights(self) -> dict[str, Tensor]:
        """Master weights; frozen ones as they are stored, in the compute dtype."""
        return {
            name: p.detach().to(p.dtype if p.requires_grad else self.compute).flatten().clone()
            for name, p in self.model.named_parameters()
        }

    def _states(self) -> dict[tuple[str, str], Tensor]:
        return {
            (name, kind): torch.as_tensor(value).flatten()[: parameter.numel()].clone()
            for name, parameter in self.model.named_parameters()
            for kind, value in self.optimizer.state.get(self.stepped[name], {}).items()
            if value is not None
        }


def _pad(tensor: Tensor) -> Tensor:
    return nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % 64))


def add_up(
    parts: Sequence[Sequence[Tensor | None]], sums: Sums, zero: Tensor, residuals: Residuals | None = None
) -> Tensor | None:
    """The sum of gradients [micro-batch][rank]; None where there is none at all. A missing one counts as zero."""
    if all(part is None for micro in parts for part in micro):
        return None
    if sums.each == "":
        local = [_left_to_right([micro[rank] for micro in parts], zero) for rank in range(sums.ranks)]
        return _over_replicas(_over_shards(local, sums, residuals), sums, residuals)
    filled = [[zero if part is None else part for part in micro] for micro in parts]
    over_shards = [_over_shards(micro, sums, residuals) for micro in filled]
    if sums.each == "SR":
        return _over_axis([_over_replicas(micro, sums, residuals) for micro in over_shards])
    replicas = [_over_axis([micro[replica] for micro in over_shards]) for replica in range(sums.replicas)]
    return _over_replicas(replicas, sums, residuals)


def _left_to_right(parts: Sequence[Tensor | None], zero: Tensor) -> Tensor:
    present = [part for part in parts if part is not None]
    return _over_axis(present) if present else zero


def _over_shards(ranks: Sequence[Tensor], sums: Sums, residuals: Residuals | None) -> list[Tensor]:
    """One sum per replica, over its shards in rank order."""
    form = sums.form if sums.replicas == 1 else ""
    return [_sent(ranks[first : first + sums.shards], form, residuals) for first in range(0, sums.ranks, sums.shards)]


def _over_replicas(parts: Sequence[Tensor], sums: Sums, residuals: Residuals | None) -> Tensor:
    return _sent(parts, sums.form, residuals) if sums.replicas > 1 else parts[0]


def _sent(parts: Sequence[Tensor], form: str, residuals: Residuals | None) -> Tensor:
    """Their sum, of matrices in fp32 of what ranks have sent in blocks."""
    if not form or not in_blocks(parts[0]):
        return _over_axis(parts)
    if residuals is not None:
        return _over_axis([residuals.sent(rank, part, form) for rank, part in enumerate(parts)]).to(parts[0].dtype)
    return _over_axis([as_sent(part.float(), form) for part in parts]).to(parts[0].dtype)


def _over_axis(parts: Sequence[Tensor]) -> Tensor:
    """((p0 + p1) + p2) + ..."""
    return functools.reduce(torch.add, parts)
