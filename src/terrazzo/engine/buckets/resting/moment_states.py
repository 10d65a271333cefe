"""What the optimizer keeps for each element of a bucket, where the bucket has the memory: away from the device, or in
8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from terrazzo.engine.buckets.resting.buffer import Resting, Space, StateStore
from terrazzo.engine.buckets.resting.coded import CodedState
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.layout import Range

__all__ = ["MomentStates"]


class MomentStates(Mapping[str, Resting]):
    """The states of the optimizer that is on the bucket, by its own names; none before there is one.

    Their memory is room for elements of this rank, which stays when the optimizer goes: the next one uses it.
    """

    def __init__(self, space: Space, spec: BucketSpec) -> None:
        self._space, self._spec = space, spec
        self._rooms: list[tuple[Range, Resting]] = []
        self._states: dict[str, Resting] = {}

    def __getitem__(self, name: str) -> Resting:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def make_room(self, store: StateStore, windows: Mapping[str, Range]) -> None:
        """Have the states of another optimizer, in room that earlier ones have left where there is any.

        Args:
            windows: for each state, by name, those of this rank's elements that have it.
        """
        states: dict[str, Resting] = {}
        for name, number in self.rooms_left(windows).items():
            if number is None:
                number = len(self._rooms)
                self._rooms.append((windows[name], self._room(store, windows[name])))
            states[name] = self._in_room(name, self._rooms[number][1])
        self._states = states

    def _room(self, store: StateStore, window: Range) -> Resting:
        axes, tier, precision = self._spec.optim_axes, self._spec.tiers.optim, self._spec.precision
        if precision.narrow is not None:
            return store.state(self._space.as_bytes(precision.narrow.blocks), axes, torch.uint8, tier)
        space = self._space if window == self._space.range(axes) else self._space.windowed(window)
        return store.state(space, axes, precision.shown_moments, tier)

    def _in_room(self, name: str, room: Resting) -> Resting:
        if (form := self._spec.precision.narrow) is None:
            return room
        return CodedState(self._space, self._spec.optim_axes, room, form.blocks.of(name), torch.float32)

    def rooms_left(self, windows: Mapping[str, Range]) -> dict[str, int | None]:
        """Choose, for each state, one of the rooms that earlier optimizers have left; None: it needs one of its own."""
        free, rooms = list(range(len(self._rooms))), dict[str, int | None]()
        for name, window in windows.items():
            fitting = (room for room in free if self._rooms[room][0].intersect(window).numel == window.numel)
            rooms[name] = next(fitting, None)
            free = [room for room in free if room != rooms[name]]
        return rooms
