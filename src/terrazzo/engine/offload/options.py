"""What a user can choose about states that do not rest on the device.

Words: `nvme` is the tier, as `cpu` is; what lies there is in swap files, and a disk is what these are on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from terrazzo.engine.plan.layout import PAGE_BYTES, round_up
from terrazzo.engine.plan.place import Plan
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count, is_number
from terrazzo.messages import did_you_mean

__all__ = ["Offload", "StepMode"]

StepMode = Literal["overlapped", "synchronous", "backward"]
STEP_MODES: tuple[str, ...] = get_args(StepMode)


class Unused(NamedTuple):
    """Why settings change nothing, and on which tier there would have to be a state."""

    why: str
    tier: str


@dataclass(frozen=True)
class Offload:
    """How states on the tiers `cpu` and `nvme` are kept and updated.

    Attributes:
        path: a folder for swap files, or several that share the load; needed for `nvme`.
        step: when offloaded states are updated. `overlapped`: behind the next forward, each unit before its weights are
            needed. `backward`: each unit as soon as its gradient is final, behind the rest of backward, which leaves no
            room for clipping or loss scaling, nor for leaving `optimizer.step()` out. `synchronous`: within
            `optimizer.step()`. All three give the same bits.
        threads: CPU threads of the update; by default from the machine's cores and the ranks on it. Threads started
            after it take the same number from torch unless they set their own.
        pin: page-lock the host memory of states, and of activations, where CUDA is there, so that copies run beside
            computation.
        direct: read and write swap files past the page cache (O_DIRECT), where the file system allows it.
        block_mib: size of one read or write, in MiB; states on `nvme` are updated in pieces of so much.
        depth: blocks in flight on this rank.
        digest: check every block that is read against what was written.

    What changes nothing under a plan, such as a path where no state is on `nvme`, is warned of by `tz.shard`.

    Raises:
        BadInput: for values that cannot work.
    """

    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    step: StepMode = "overlapped"
    threads: int | None = None
    pin: bool = True
    direct: bool = True
    block_mib: float = 4
    depth: int = 8
    digest: bool = False

    def __post_init__(self) -> None:
        if self.step not in STEP_MODES:
            raise BadInput(
                f"offload: step {self.step!r} does not exist.{did_you_mean(str(self.step), STEP_MODES)} "
                f"Use one of {', '.join(STEP_MODES)}."
            )
        if self.threads is not None:
            _check_number("threads", self.threads, 1, 4096)
        _check_number("depth", self.depth, 1, 256)
        for name in ("pin", "direct", "digest"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"offload: {name} is {getattr(self, name)!r}; give True or False.")
        sized = is_number(self.block_mib) and 0 < self.block_mib <= 64
        if not sized or not self.block_bytes or self.block_bytes % PAGE_BYTES:
            raise BadInput(
                f"offload: block_mib is {self.block_mib!r}; give a multiple of 4 KiB up to 64 MiB, such as 4 or 0.25."
            )
        if self.path is not None:
            _check_path(self.path)

    def used_under(self, plan: Plan, activations: bool = False) -> Offload:
        """These settings, those at their defaults that change nothing under `plan`; arguments as of `unused_under`."""
        unused = {name for names in self.unused_under(plan, activations).values() for name in names}
        used: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in unused}
        return Offload(**used)

    @staticmethod
    def unused_under(plan: Plan, activations: bool = False) -> dict[Unused, Sequence[str]]:
        """Names of the settings that change nothing under `plan`.

        Args:
            activations: whether activations are in host memory.
        """
        tiers = {tier for place in plan.places().values() for tier in place.shares}
        unused: dict[Unused, Sequence[str]] = {}
        if "nvme" not in tiers:
            unused[Unused("no state is on nvme", "nvme")] = ("path", "direct", "block_mib", "depth", "digest")
        if not plan.optim.offloaded:
            unused[Unused("the optimizer's state is on the device", "cpu")] = ("step", "threads")
        if not tiers - {"device"} and not activations:
            unused[Unused("no state is in host memory", "cpu")] = ("pin",)
        return unused

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that swap files go to."""
        return tuple(Path(path) for path in self._paths())

    def _paths(self) -> Sequence[str | os.PathLike[str]]:
        if self.path is None:
            return ()
        return [self.path] if isinstance(self.path, str | os.PathLike) else self.path

    @property
    def block_bytes(self) -> int:
        return round(self.block_mib * 2**20)

    @property
    def cell_numel(self) -> int:
        """Elements of a cell: a block of fp32, in whole pages of them. The same for every dtype, so that the cells of
        all states coincide.
        """
        return round_up(self.block_bytes // 4, 4096)


def _check_path(path: object) -> None:
    paths = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(paths, Sequence) or not all(isinstance(each, str | os.PathLike) for each in paths):
        raise BadInput(f"offload: path is {path!r}; give a folder, or several in a list.")
    if not paths or not all(map(str, paths)):
        raise BadInput("offload: path is empty; name at least one folder.")


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if not is_count(value, low) or value > high:
        raise BadInput(f"offload: {name} is {value!r}; give an int from {low} to {high}.")
