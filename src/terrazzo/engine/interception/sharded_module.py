"""What a sharded model answers differently from the module it was: loading, zeroing, converting, copying."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.interception.collective_calls import giving_states, on_every_rank, taking_states
from terrazzo.engine.interception.load_hooks import check_loading, hooked_after, hooked_before, own_method
from terrazzo.engine.interception.torch_wrappers import refuse_class
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.model.training_calls import accumulate
from terrazzo.engine.states.buffers_and_extra_state import (
    PersistentBuffer,
    extra_state,
    extra_state_takers,
    persistent_buffers,
    replace_buffers,
)
from terrazzo.engine.states.given_weights import GivenWeights
from terrazzo.engine.states.state_dict import shows_all, whole_state_dict
from terrazzo.errors import BadInput, Misuse
from terrazzo.given_numbers import is_number
from terrazzo.messages import listed

__all__ = ["ShardedModule", "make_sharded_module"]

_STATE_DICT = giving_states("model.state_dict()")
_LOAD_STATE_DICT = taking_states("model.load_state_dict(state)")


class _Loaded(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]


class ShardedModule(nn.Module):
    """Mixed into the class of a sharded model."""

    _terrazzo: Engine

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        refuse_class(cls)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, as the optimizer's `zero_grad` does, and do what else the model's class does then."""
        self._terrazzo.gradients.zero(set_to_none)
        if own_method(type(self), "zero_grad") is not nn.Module.zero_grad:
            super().zero_grad() if set_to_none else super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """`tz.accumulate`, under the name that DDP and FSDP have for it; the forward may stand outside.

        Raises:
            Misuse: where the model's class has one of its own, which would not be called.
        """
        if own_method(type(self), "no_sync") is not None:
            raise Misuse(
                f"{type(self).__name__} has a no_sync of its own, which a sharded model does not call: write "
                "'with tz.accumulate(model):', or give that method another name."
            )
        return accumulate(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict that the model would have if it were not sharded, on every rank. Collective.

        Where no values are split, and weights are kept in the dtype of their masters, it is that of any module: its
        tensors are the model's own, and nothing is exchanged unless an update is under way. Else they are copies on the
        mesh's device, with the master weights of what is trained. Inside `tz.gathered` they are the parameters as they
        are there, in the compute dtype, copied where their memory will be freed.

        Args:
            args, kwargs: `destination`, `prefix` and `keep_vars`, as torch has them. With `keep_vars` it lists the
                parameters, of which some may be at rest.

        Raises:
            RanksApart: where ranks do something else meanwhile.
            Misuse: where the whole model does not fit on the device; it names the calls that need no room for it. Where
                units have been updated whose `optimizer.step()` is still to come, or never came.
        """
        options = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
        self._terrazzo.catch_up()
        if options.pop("keep_vars", False):
            return super().state_dict(**options, keep_vars=True)
        self._terrazzo.requires.step_taken("model.state_dict()", reads="weights")
        if shows_all(self):
            return super().state_dict(**options)
        with on_every_rank(self._terrazzo, _STATE_DICT):
            try:
                return whole_state_dict(self, self._terrazzo.axes.device, **options)
            except torch.OutOfMemoryError as error:
                raise Misuse(
                    f"model.state_dict() gives the whole {type(self).__name__} on every rank. {_TOO_LARGE}"
                ) from error

    def set_gradient_denominator(self, denominator: float | Tensor | None) -> None:
        """From now on, divide the sum of gradients over ranks and micro-batches by this.

        Args:
            denominator: such as the number of valid tokens in the global batch when losses are sums over tokens; None
                for the number of data ranks, DDP's mean. A tensor of one element is read now. The same on every rank: a
                backward pass raises `RanksApart` where it is not.

        Raises:
            BadInput: what is not one positive and finite number.
            Misuse: between the last micro-batch's backward, which has divided by the one before, and the step; of
                several optimizers that of each whose parameters have gradients.
        """
        if denominator is not None and not _is_positive(denominator):
            raise BadInput(
                f"The gradient denominator is {denominator!r}; it must be one positive and finite number, or None for "
                "the number of data ranks."
            )
        chosen, gradients = None if denominator is None else float(denominator), self._terrazzo.gradients
        self._terrazzo.progress.denominator.choose(chosen, in_use=gradients.awaits_step)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors by name, one at a time: each rank keeps its own ranges. Collective.

        Args:
            state_dict: full tensors of any dtype, the same on every rank. It may be lazy: each is looked up when it is
                needed. A tensor that the model has under several names may come under any of them. Modules that have
                their own `set_extra_state` are given theirs, and hooks that they have registered for loading are
                called, before and after.
            strict: refuse missing and unexpected names; else what is missing keeps its values.
            assign: changes nothing: parameters stay views of the engine's memory, in the dtypes of its precision.

        Returns:
            `missing_keys` and `unexpected_keys`, as torch does.

        Raises:
            BadInput: for what is no state dict, for names, if `strict`, for tensors of other shapes, and for modules
                that load in a way of their own, on any rank. No weight and no buffer has been changed by then, but
                hooks from before loading have been called, and what they have done to the model stays.
            RanksApart: where ranks were given other names, likewise, or other values.
            Misuse: likewise, within a round of `DiLoCo`, where replicas have other weights than each other.
        """
        buffers, takers, axes = persistent_buffers(self), extra_state_takers(self), self._terrazzo.axes
        own = GivenWeights(self)
        with on_every_rank(self._terrazzo, _LOAD_STATE_DICT):
            edited, loaded = all_or_none(axes, lambda: self._prepare_loading(state_dict, strict, own, buffers, takers))
            own.take(edited, buffers)
        for name, module in takers.items():
            if name in edited:
                module.set_extra_state(edited[name])
        hooked_after(self, loaded)
        return loaded

    def _prepare_loading(
        self,
        state_dict: Any,
        strict: bool,
        own: GivenWeights,
        buffers: Sequence[PersistentBuffer],
        takers: Mapping[str, nn.Module],
    ) -> tuple[Mapping[str, Any], _Loaded]:
        """A state dict as modules' hooks change it; what it lacks, and what it has too much.

        Raises:
            BadInput: where there is any, if `strict`; for what is no state dict; for modules that load otherwise.
        """
        if not isinstance(state_dict, Mapping):
            raise BadInput(
                f"load_state_dict takes names with full tensors, not a {type(state_dict).__name__}. A file is read by"
                " tz.checkpoint.load_weights(model, path), and a module gives its state_dict()."
            )
        check_loading(self)
        state_dict, missing_by_hooks = hooked_before(self, state_dict, strict)
        known = {name for names in own.names for name in names}
        known |= {name for buffer in buffers for name in buffer.names} | takers.keys()
        absent = {buffer.name for buffer in buffers if not any(name in state_dict for name in buffer.names)}
        missing = sorted({*own.missing(state_dict), *absent, *missing_by_hooks})
        missing += [name for name, each in takers.items() if name not in state_dict and extra_state(each) is not None]
        unexpected = [name for name in state_dict if name not in known]
        if strict and (missing or unexpected):
            how = _meant(state_dict, unexpected, known) or "Pass strict=False to load what matches."
            lists = [listed([*map(repr, names)], _NAMED) or "nothing" for names in (missing, unexpected)]
            raise BadInput(f"load_state_dict: missing {lists[0]}, unexpected {lists[1]}. {how}")
        return state_dict, _Loaded(missing, unexpected)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `.to`, `.half` and their like: to parameters nothing, or an error if it would be something; to buffers
        what they do to those of any module.
        """
        device = self._terrazzo.axes.device
        kinds = {(b.spec.compute_dtype, len(slot.shape)) for b in self._terrazzo.buckets() for slot in b.slots}
        for dtype, dims in sorted(kinds, key=str):
            probe = torch.empty((2,) * dims, dtype=dtype, device=device)
            changed = fn(probe)
            reordered = changed.stride() != probe.stride()  # as by memory_format=torch.channels_last
            if reordered or (changed.dtype, changed.device) != (dtype, device):
                raise Misuse(
                    f"This would turn parameters on {device} in {dtype} into {changed.dtype} on {changed.device}"
                    f"{', in another memory format' if reordered else ''}, but the weights of a sharded model are "
                    "views of the engine's memory. Convert the model before tz.shard, or choose its 'precision'."
                )
        replace_buffers(self, fn)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Misuse(
            f"A sharded {type(self).__name__} cannot be pickled, and so not saved with torch.save: this rank has a "
            "part of its weights alone. Save with tz.checkpoint.save(path, model, optimizer)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise Misuse(
            f"A sharded {type(self).__name__} cannot be deep-copied: its parameters are views of sharded memory. Copy "
            "the model before tz.shard, or load its weights into a second model. For an average of its weights, as of "
            "torch.optim.swa_utils.AveragedModel, use tz.EMA(model, decay)."
        )


def _meant(state_dict: Mapping[str, Any], unexpected: Sequence[str], known: Set[str]) -> str:
    """What to pass in place of a program's whole file, or of the state dict of a wrapper; empty for any other."""
    if len(unexpected) < len(state_dict):
        return ""
    for key in unexpected[:_NAMED]:
        inner = state_dict[key]
        if isinstance(inner, Mapping) and known & {str(name).removeprefix(_DDP) for name in inner}:
            return (
                f"The model's state dict is under {key!r}: pass state_dict[{key!r}], or have"
                " tz.checkpoint.load(path, model, optimizer) read the whole file, optimizer and all."
            )
    if known & {str(name).removeprefix(_DDP) for name in state_dict}:
        return (
            f"They begin with {_DDP!r}, as DistributedDataParallel has them: pass"
            f" {{name.removeprefix({_DDP!r}): value for name, value in state_dict.items()}}."
        )
    return ""


_TOO_LARGE = (
    "It does not fit on this device: tz.full_state_dict(model) has it in host memory of rank 0, "
    "tz.save_pretrained(model, folder) writes a folder for transformers, and tz.checkpoint.save(path, model, "
    "optimizer, extra) what training continues from."
)
_NAMED = 20  # of a large model's thousands
_DDP = "module."


def make_sharded_module(model: nn.Module, engine: Engine) -> None:
    """Turn `model` into a `ShardedModule` of its own class, in place."""
    kind = type(model)
    model._terrazzo = engine  # type: ignore[assignment]
    model.__class__ = type(
        kind.__name__, (ShardedModule, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def _is_positive(number: Any) -> bool:
    """Whether it is one number, or a tensor of one element, above zero and finite."""
    single = number.numel() == 1 if isinstance(number, Tensor) else is_number(number)
    return single and 0 < float(number) < math.inf
