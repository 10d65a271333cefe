"""Drives a stock `torch.optim` optimizer over flat shards of master weights, and clips by the global norm.

The user's optimizer object stays the same one, with its param groups, hyper-parameters and schedulers: only the tensors
in its groups are replaced. Before its own step, gradients are handed to those tensors; after it, the updated master
weights are published to the compute weights. A step that must not happen simply finds no gradients.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.background import Background
from terrazzo.engine.bucket import Bucket, Member
from terrazzo.engine.gradient import Finished, Gradient
from terrazzo.engine.recipe import Recipe
from terrazzo.engine.scaler import LossScaler
from terrazzo.engine.schedule import Schedule
from terrazzo.engine.segment import Segment, segments_of
from terrazzo.engine.store.settings import StepMode
from terrazzo.engine.unit import Unit
from terrazzo.engine.update import Updater, unhooked_step
from terrazzo.errors import BadInput, Misuse

__all__ = [
    "ELEMENTWISE",
    "OptimizerDriver",
    "ShardedOptimizer",
    "StateSpec",
    "adopt",
    "assign_groups",
    "check_optimizer",
    "choose_kernel",
    "clip_grad_norm",
    "forget_gradients",
    "state_of",
]

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
)
"""Optimizers whose update of an element depends on that element's own values alone: correct on any flat shard."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Errors: `BadInput` for an optimizer that is not known to be elementwise."""
    name = type(optimizer).__name__
    if not (type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False)):
        raise BadInput(
            f"{name} cannot run on flat shards: it is not known to update each element from that element's values "
            "alone (Adafactor, Muon, LBFGS and Shampoo do not). Use one of "
            f"{', '.join(sorted(known.__name__ for known in ELEMENTWISE))}, or set 'elementwise = True' on your "
            "optimizer class if its update is elementwise."
        )


def assign_groups(optimizer: Optimizer, members: Sequence[Member]) -> None:
    """Note on each member which param group owns it. Errors: `BadInput` for parameters that are not the model's."""
    by_parameter = {member.parameter: member for member in members}
    foreign = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in by_parameter:
                by_parameter[parameter].group = index
            else:
                foreign += 1
    if foreign:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        raise BadInput(
            f"{foreign} of the optimizer's {total} parameters are not parameters of this model. Build the optimizer "
            "over model.parameters() of the model you shard, after any step that replaces parameters."
        )


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps for a parameter under one key.

    Attributes:
        per_element: one value per element of the parameter, in the dtype of moments; else of the shape that follows.
        kind: Tensor, or the Python type of a plain number.
    """

    per_element: bool
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    kind: type = Tensor

    @property
    def fixed_bytes(self) -> int:
        """Memory of a state that is not per element."""
        return math.prod(self.shape) * self.dtype.itemsize if self.kind is Tensor and not self.per_element else 0

    def restored(self, flat: Tensor, device: torch.device | None) -> Any:
        """`flat` as the optimizer expects it for a parameter on `device`."""
        if self.kind is not Tensor:
            return self.kind(flat.item())
        on_cpu = self.device is None or self.device.type == "cpu"
        return flat.to(device=self.device if on_cpu else device, dtype=self.dtype).reshape(self.shape).clone()


def choose_kernel(optimizer: Optimizer) -> None:
    """Take the fused kernel where the user has not chosen: on a CPU it is many times as fast as torch's default, and
    one kernel on every tier makes one result.
    """
    for group in optimizer.param_groups:
        if type(optimizer) in _FUSED and group.get("fused") is None and not group.get("foreach"):
            group["fused"] = True


_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def state_of(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, StateSpec]:
    """What this optimizer keeps for each parameter of `group`.

    Taken from a parameter that has state already, else found by stepping a tensor of two elements on a zero gradient.
    """
    for parameter in group["params"]:
        if parameter.dim() and (state := optimizer.state.get(parameter)):
            return _specs(state, parameter.shape)
    on_cuda = next((parameter.device for parameter in group["params"] if parameter.is_cuda), None)
    tensor = nn.Parameter(torch.zeros(2, device=on_cuda))  # where a state lives may follow the parameter
    tensor.grad = torch.zeros_like(tensor)
    probe = object.__new__(type(optimizer))  # copy.copy would drop attributes that are not in its __getstate__
    probe.__dict__.update(optimizer.__dict__)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [tensor]}]
    unhooked_step(probe)
    return _specs(probe.state[tensor], tensor.shape)


def _specs(state: Mapping[str, Any], shape: torch.Size) -> dict[str, StateSpec]:
    specs = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            specs[key] = StateSpec(per_element=False, kind=type(value))
        else:
            specs[key] = StateSpec(value.shape == shape, tuple(value.shape), value.dtype, value.device)
    return specs


class OptimizerDriver:
    """Feeds one optimizer from the buckets of one model.

    Args:
        optimizer: its groups' tensors are replaced by segments.
        units: of the model, built.
        schedule: of the model.
        publish: brings compute weights in line with updated master weights.

    Attributes:
        segments: what the optimizer steps.
        background: updates away from the device; None where there are none.
        reference: to the optimizer, weak.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Unit],
        recipe: Recipe,
        schedule: Schedule,
        publish: Callable[[], None],
    ) -> None:
        self.buckets = [bucket for unit in units for bucket in unit.trainable()]
        self.units, self.recipe, self.schedule = units, recipe, schedule
        self._publish = weakref.WeakMethod(publish)  # its owner owns this driver
        self.segments = [segment for segment in segments_of(self.buckets) if segment.group >= 0]
        self.background: Background | None = None
        scaling = recipe.precision.loss_scaling
        self.scaler = LossScaler(scaling) if scaling else None
        self.reference, self._retired = weakref.ref(optimizer), False
        self._moments_differ = recipe.precision.moments != recipe.precision.master
        self._fill_groups(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _fill_groups(self, optimizer: Optimizer) -> None:
        for index, group in enumerate(optimizer.param_groups):
            segments = [segment for segment in self.segments if segment.group == index]
            group["params"] = [segment.parameter for segment in segments]
            if "param_names" in group:
                group["param_names"] = [segment.bucket.members[segment.first].name for segment in segments]

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self.reference()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    def update_apart(self, updater: Updater, mode: StepMode) -> None:
        """Have segments away from the device updated by `updater`."""
        reference = weakref.ref(self)

        def segments() -> list[Segment]:
            live = reference()
            return live.segments if live is not None else []

        def reduced(unit: int) -> None:
            if (live := reference()) is not None and live.background is not None:
                live.background.unit_reduced(unit, live.optimizer)

        self.background = Background(self.units, self.schedule, updater, mode, segments)
        self.schedule.reduced = reduced

    def settle(self) -> None:
        """Return once no update is under way."""
        if self.background is not None:
            self.background.settle()

    def retire(self) -> None:
        """Drive no longer; nothing may be under way."""
        self.buckets, self.segments, self._retired = [], [], True

    # -- the step ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (args[1:] and args[1] is not None) or kwargs.get("closure") is not None:
            raise Misuse("optimizer.step(closure) is not supported on sharded weights: run forward and backward first.")
        if self._retired:
            raise Misuse(f"This {type(optimizer).__name__} no longer drives a model, which another optimizer has got.")
        if any(bucket.gradient.unfinished for bucket in self.buckets):
            raise Misuse(
                "optimizer.step() was called while gradients were still being accumulated. Run the last micro-batch's "
                "backward outside 'with tz.accumulate(model)', so that it reduces them."
            )
        if self.scaler is not None:
            overflow = self._overflowed()
            self.scaler.update(overflow)
            if overflow:
                return
        self._cut_segments(optimizer)
        if self.background is not None:
            self.background.begin(optimizer)
        here = [segment for segment in self.segments if not segment.bucket.updated_apart and segment.due]
        finished = {bucket: bucket.gradient.handed_over() for bucket in {segment.bucket: None for segment in here}}
        if self._moments_differ:
            self._step_one_by_one(optimizer, here, finished)
        else:
            for segment in here:
                segment.parameter.grad = segment.gradient(finished[segment.bucket])

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for segment in self.segments:
            segment.parameter.grad = None
        if (publish := self._publish()) is not None:
            publish()
        if self.background is not None:
            self.background.end_step()

    def _cut_segments(self, optimizer: Optimizer) -> None:
        self.recut(optimizer, [segment.cut(segment.seen, optimizer) for segment in self.segments])

    def recut(self, optimizer: Optimizer, parts: list[list[Segment]]) -> None:
        """Put `parts` in the place of the segments that they were cut from."""
        segments = [segment for pieces in parts for segment in pieces]
        if segments != self.segments:
            self.segments = segments
            self._fill_groups(optimizer)

    def _step_one_by_one(
        self, optimizer: Optimizer, segments: Sequence[Segment], finished: Mapping[Bucket, Finished]
    ) -> None:
        """Moments live in their own dtype: bring one segment's to the master's, step it alone, put them back."""
        precision = self.recipe.precision
        for segment in segments:
            segment.parameter.grad = segment.gradient(finished[segment.bucket])
            _cast_moments(optimizer, segment.parameter, precision.master)
            with _only(optimizer, segment):
                unhooked_step(optimizer)
            _cast_moments(optimizer, segment.parameter, precision.moments)
            segment.parameter.grad = None

    def _overflowed(self) -> bool:
        """Whether any rank holds a non-finite gradient."""
        wholes = (bucket.gradient.whole() for bucket in self.buckets)
        finite = all(bool(torch.isfinite(grad).all()) for grad in wholes if grad is not None)
        flag = torch.tensor([int(not finite)], dtype=torch.int64, device=self.recipe.axes.device)
        return bool(self.recipe.axes.maximum(flag).item())

    def zero_grad(self, set_to_none: bool) -> None:
        if not set_to_none:
            self.settle()  # an update may still read what is going to be zero
        if self.background is not None:
            self.background.forget(abandoned=self.schedule.in_backward)
        forget_gradients(self.buckets, self.schedule, set_to_none)


def forget_gradients(buckets: Iterable[Bucket], schedule: Schedule, set_to_none: bool) -> None:
    """Forget every gradient, those on their way from a backward that raised included."""
    if schedule.in_backward:
        schedule.abandon_backward()
    for bucket in buckets:
        bucket.zero_grad(set_to_none)


class ShardedOptimizer(Optimizer):
    """Mixed into the class of an optimizer that drives a sharded model."""

    _driver: OptimizerDriver

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._driver.zero_grad(set_to_none)

    @property
    def skipped_steps(self) -> int:
        """Steps that a non-finite fp16 gradient on any rank has cancelled."""
        return self._driver.scaler.skipped_steps if self._driver.scaler else 0

    @property
    def loss_scale(self) -> float:
        """The factor now applied to gradients inside the model; 1 without loss scaling."""
        return self._driver.scaler.scale if self._driver.scaler else 1.0

    def scaler_state(self) -> dict[str, float]:
        """The loss scaler's counters as plain numbers; empty without loss scaling."""
        return self._driver.scaler.state() if self._driver.scaler else {}

    def load_scaler_state(self, state: dict[str, float]) -> None:
        if self._driver.scaler and state:
            self._driver.scaler.load_state(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Misuse("A sharded optimizer cannot take further param groups: give it all of them before tz.shard.")

    def state_dict(self) -> Any:
        raise Misuse(
            "A sharded optimizer's state_dict would hold only this rank's flat shards. Save with tz.checkpoint.save, "
            "which names every piece by its parameter and resumes on any number of ranks."
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise Misuse("A sharded optimizer cannot load a plain state_dict: restore with tz.checkpoint.load.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise Misuse("A sharded optimizer cannot be deep-copied: its tensors are views of the model's master weights.")


def adopt(optimizer: Optimizer, driver: OptimizerDriver) -> None:
    """Turn `optimizer` into a `ShardedOptimizer` of its own class, in place."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (ShardedOptimizer, kind), {"__module__": kind.__module__})
    optimizer._driver = driver  # type: ignore[attr-defined]


def clip_grad_norm(buckets: Iterable[Bucket], recipe: Recipe, max_norm: float, norm_type: float) -> Tensor:
    """Scale every finished gradient by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    axes, split = recipe.axes, recipe.plan.optim.axes
    gradients = [bucket.gradient for bucket in buckets if bucket.gradient.is_finished]
    local = [_norm(gradient, norm_type).to(axes.device) for gradient in gradients]
    norms = torch.stack(local) if local else torch.zeros(1, dtype=torch.float64, device=axes.device)
    if norm_type == float("inf"):
        total = axes.total(norms.max(), split, reduce=torch.amax)
    else:
        total = axes.total((norms**norm_type).sum(), split) ** (1 / norm_type)
    if max_norm != float("inf"):
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.scale(coefficient)
    return total.float()


def _norm(gradient: Gradient, norm_type: float) -> Tensor:
    grad = gradient.whole()
    assert grad is not None
    dtype = torch.promote_types(grad.dtype, torch.float32)  # 16 bits can neither hold nor sum the squares of gradients
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype).double()
    return norm


def _cast_moments(optimizer: Optimizer, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    state = optimizer.state[parameter]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            state[key] = value.to(dtype)


@contextlib.contextmanager
def _only(optimizer: Optimizer, segment: Segment) -> Iterator[None]:
    """The optimizer with this segment as its only parameter."""
    groups = optimizer.param_groups
    group = groups[segment.group]
    params = group["params"]
    optimizer.param_groups, group["params"] = [group], [segment.parameter]
    try:
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, params
