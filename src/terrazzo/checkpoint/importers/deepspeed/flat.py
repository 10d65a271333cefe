"""Parameters in the flat tensors that DeepSpeed's ZeRO stages keep on each rank.

Stages 1 and 2 lay the parameters of a group end to end, perhaps with a few unused elements between, and cut that into
equal parts. Stage 3 cuts each parameter, and lays the pieces of a sub-group end to end. The parts are padded; weights
are saved without padding at the end, or with, and other states with. Nothing here relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.importers.deepspeed.files import Shape, Tree, need
from terrazzo.checkpoint.importers.deepspeed.trained import EXPERTS, Trained, add_groups
from terrazzo.checkpoint.importers.parts.values import LoadedTensor, Values
from terrazzo.checkpoint.source import BUFFER, WEIGHT
from terrazzo.errors import BadInput, Damaged

__all__ = ["FlatGroup", "Partitioned", "Stripes", "read_stage_1_or_2", "read_stage_3", "single", "state_of", "striped"]


@dataclass(frozen=True)
class Stripes:
    """Where a parameter is: element `i` is that at `base + (first + i) % share` of rank `(first + i) // share`."""

    shape: Shape
    share: int
    base: int = 0
    first: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Partitioned(Values):
    """A tensor in parts, one in each rank's flat tensor.

    Raises:
        Damaged: they do not hold all of it; `what` names it.
    """

    def __init__(self, parts: Sequence[Values], place: Stripes, what: str) -> None:
        self.shape, self.dtype = place.shape, parts[0].dtype
        self._parts, self._place = parts, place
        for rank, _, stop in self._spans(0, place.numel):
            if rank >= len(parts) or stop > parts[rank].numel or parts[rank].dtype != self.dtype:
                raise Damaged(
                    f"{what} is not complete: rank {rank} should hold elements up to {stop} of a flat tensor."
                )

    def read(self, start: int, stop: int) -> Tensor:
        pieces = [self._parts[rank].read(first, last) for rank, first, last in self._spans(start, stop)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Each rank that holds some of a range, and from where to where in its flat tensor."""
        place = self._place
        start, stop = start + place.first, stop + place.first
        while start < stop:
            rank, offset = divmod(start, place.share)
            count = min(stop - start, place.share - offset)
            yield rank, place.base + offset, place.base + offset + count
            start += count


class FlatGroup:
    """The flat tensors of some parameters: each rank's weights, and each rank's states of the optimizer for them.

    Attributes:
        notes: a line for each kind of state that is neither one value for each weight nor one for all.
    """

    def __init__(self, weights: Sequence[Values], states: Sequence[Mapping[str, Any]], where: str) -> None:
        self._where = where
        self._by_element: dict[str, Sequence[Values]] = {WEIGHT: weights}
        self._once: dict[str, Values] = {}
        self.notes: list[str] = []
        for kind, value in states[0].items():
            if not isinstance(kind, str) or kind in (WEIGHT, BUFFER) or not self._take(kind, value, states):
                self.notes.append(f"{kind}, of the optimizer, is not taken over: it is not by parameter")

    def _take(self, kind: str, value: Any, states: Sequence[Mapping[str, Any]]) -> bool:
        if isinstance(value, Values) and value.shape != () and value.numel >= self._by_element[WEIGHT][0].numel:
            self._by_element[kind] = [need(state, kind, Values, self._where) for state in states]  # type: ignore[type-abstract]
        elif (isinstance(value, Values) and value.numel == 1) or type(value) in (int, float):
            self._once[kind] = single(value, self._where)
        else:
            return value is None
        return True

    def states_at(self, name: str, place: Stripes) -> dict[str, Values]:
        """A parameter's weight and other states."""
        states: dict[str, Values] = {
            kind: Partitioned(parts, place, f"{kind} of '{name}' in '{self._where}'")
            for kind, parts in self._by_element.items()
        }
        return states | self._once


def read_stage_1_or_2(shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[Tree], where: str) -> Trained:
    """Read what stages 1 and 2, and BF16_Optimizer, save of trained parameters.

    Args:
        shapes: of the parameters of each group, in flat order.
        ranks: what each rank saved of its optimizer.

    Raises:
        BadInput: it is damaged, or of experts; `where` names it.
    """
    trained = Trained()
    for index, group_shapes in enumerate(shapes):
        weights = [_weights(rank, "single_partition_of_fp32_groups", index, where) for rank in ranks]
        group = FlatGroup(weights, [_base_state(rank, index) for rank in ranks], where)
        paddings = _alignment_paddings(ranks[0], index, len(group_shapes), where)
        first = 0
        for (name, shape), padding in zip(group_shapes.items(), paddings, strict=True):
            # The first rank lacks padding only if it has everything else, and then its length stands for nothing.
            place = Stripes(shape, share=max(1, weights[0].numel), first=first)
            trained.states[name] = group.states_at(name, place)
            first += place.numel + padding
        if not 0 <= sum(part.numel for part in weights) - first < 2 * len(ranks):
            raise Damaged(
                f"'{where}' is not what DeepSpeed writes: flat tensor {index} has {[part.numel for part in weights]}"
                f" elements on its ranks, and its parameters would fill {first}."
            )
        trained.notes += group.notes
    base = ranks[0].get("base_optimizer_state")
    if isinstance(base, list):
        trained.groups = [{"params": list(group_shapes)} for group_shapes in shapes]
        trained.notes.append("hyper-parameters are not taken over: elastic checkpoints do not hold them")
    else:
        add_groups(trained, need(ranks[0], "base_optimizer_state", dict, where), shapes, where)
    return trained


def read_stage_3(shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[Tree], where: str) -> Trained:
    """Read what stage 3 saves, as `read_stage_1_or_2` does; the groups of `shapes` are sub-groups."""
    if any(rank.get("ds_zero_partition_groups") for rank in ranks):
        raise BadInput(EXPERTS.format(where))
    trained = Trained()
    optimizers = [need(rank, "optimizer_state_dict", dict, where) for rank in ranks]
    for index, group_shapes in enumerate(shapes):
        weights = [_weights(rank, "fp32_flat_groups", index, where) for rank in ranks]
        group = FlatGroup(weights, [state_of(optimizer, index) for optimizer in optimizers], where)
        base = 0
        for name, shape in group_shapes.items():
            place = striped(shape, len(ranks), base)
            trained.states[name] = group.states_at(name, place)
            base += place.share
        if any(part.numel != base for part in weights):
            raise Damaged(
                f"'{where}' is not for {len(ranks)} ranks: its parameters would fill {base} elements of flat tensor"
                f" {index} on each, and there are {weights[0].numel}. Checkpoints of MiCS are not imported."
            )
        trained.notes += group.notes
    add_groups(trained, optimizers[0], shapes, where)
    return trained


def striped(shape: Shape, ranks: int, base: int = 0) -> Stripes:
    """Where stage 3 puts a parameter of at least one element."""
    return Stripes(shape, share=-(-math.prod(shape) // ranks), base=base)


def state_of(optimizer: Any, number: int) -> Mapping[str, Any]:
    """The state that an optimizer's state dict has for a parameter; empty without one."""
    states = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    state = states.get(number) if isinstance(states, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def single(value: Any, where: str) -> Values:
    """A state of one number for a whole parameter, such as Adam's `step`, in float32. Raises `Damaged`."""
    number = value.item() if isinstance(value, Values) and value.numel == 1 else value
    if type(number) not in (int, float) or not abs(number) < 1 << 53:
        raise Damaged(f"'{where}' is not what DeepSpeed writes: a step is {type(value).__name__}, not a number.")
    return LoadedTensor(torch.tensor([number], dtype=torch.float32), where)


def _base_state(rank: Tree, index: int) -> Mapping[str, Any]:
    """The base optimizer's state of a group. Elastic checkpoints have only a list of them."""
    base = rank.get("base_optimizer_state")
    return state_of({"state": dict(enumerate(base))} if isinstance(base, list) else base, index)


def _weights(rank: Tree, key: str, index: int, where: str) -> Values:
    return need(need(rank, key, list, where), index, Values, where)  # type: ignore[type-abstract]


def _alignment_paddings(rank: Tree, index: int, count: int, where: str) -> list[int]:
    """Unused elements after each parameter of a group."""
    if rank.get("param_alignment_paddings") is None:  # BF16_Optimizer has none
        return [0] * count
    paddings = need(need(rank, "param_alignment_paddings", list, where), index, list, where)
    if len(paddings) != count or not all(type(padding) is int and 0 <= padding < 1 << 32 for padding in paddings):
        raise Damaged(f"'{where}' is not what DeepSpeed writes: it has no padding for each parameter of group {index}.")
    return paddings
