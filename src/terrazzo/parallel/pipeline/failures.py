"""How all ranks learn which of them has failed first in a step, and what was raised there.

A rank that fails writes a note into the store by which the process group was made; the first note of a step stays. Then
the rank goes on to the end of the step without computing, and sends zeros that others wait for. At the end all ranks
meet, and each raises. Where a process has ended, connections break instead: a rank that loses one reads the note, and
writes one where there is none.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.private_torch import default_store
from terrazzo.errors import BY_NAME, ConnectionLost, lost_a_rank

__all__ = ["PATIENCE_S", "FailedElsewhere", "Failures", "LostRank", "broke_a_connection"]

PATIENCE_S = 5.0
"""How long a rank that has failed waits for another, which may wait for it elsewhere: then it ends, which is heard."""
WORD_S = 2.0
"""How long a rank that has lost a connection looks for the word of whoever knows why."""


class FailedElsewhere(ConnectionLost):
    """Another rank has failed first; the message names it, and what was raised there."""


class LostRank(ConnectionLost):
    """The process of another rank has ended; the message names it."""


class Failures:
    """The failures in one model's steps.

    Args:
        axes: of the mesh.
        stages: of the whole model.
    """

    def __init__(self, axes: Axes, stages: int) -> None:
        self._axes, self._stages, self._step = axes, stages, 0
        sizes = " x ".join(str(axes.size([axis])) for axis in axes.within_replica)
        models = _MODELS.setdefault(axes.along(axes.stage_axis[0]).group, Counter())
        models[sizes] += 1
        self._model = f"terrazzo/failed/{sizes}/{models[sizes]}"

    def begin(self) -> None:
        """A further step begins, as on every rank."""
        self._step += 1

    def leave(self, error: Exception, stage: int | None = None) -> None:
        """This rank has failed, in a stage or before it came to one: leave word of it, if no other has."""
        rank, kind = dist.get_rank(), type(error).__name__
        where = "" if stage is None else f" (stage {stage + 1} of {self._stages})"
        own = str(error) if kind in BY_NAME else f"{kind}: {error}"
        text = str(error) if isinstance(error, LostRank) else f"Rank {rank}{where} has failed first: {own}"
        with contextlib.suppress(RuntimeError):  # the store may have gone with its process
            default_store().compare_set(self._key, "", json.dumps([rank, kind, text]))

    def meet(
        self, numbers: Sequence[float], problem: Exception | None = None, patience_s: float | None = None
    ) -> list[float]:
        """The greatest of each of the ranks' `numbers`, where none of them has failed. Collective over the whole mesh.

        Args:
            problem: why this rank has; word of it has been left.
            patience_s: where ranks of one stage may wait for each other elsewhere, how long a rank that has failed
                waits for other stages. Others than those along `pp` lose their connections then.

        Raises:
            Exception: what `problem` is, or what the first rank that has failed has told.
        """
        axes, gathered = self._axes, torch.tensor([problem is not None, *numbers], dtype=torch.float64, device=HOST)
        try:
            axes.maximum(gathered, axes.stage_axis, patience_s if problem is not None else None)
            if patience_s is None or not gathered[0]:
                axes.maximum(gathered, axes.within_stage)
        except RuntimeError as error:
            if problem is None:
                raise self._reason_for(error) from error
            axes.break_off()
            raise problem from None
        if gathered[0] and patience_s is not None:
            axes.break_off()
        if problem is not None:
            raise problem
        if gathered[0]:
            raise self._first(WORD_S) or FailedElsewhere("Another rank has failed in this step: see what it says.")
        greatest: list[float] = gathered[1:].tolist()
        return greatest

    def _reason_for(self, error: Exception) -> Exception:
        """What this rank raises where `error` has been raised."""
        if isinstance(error, FailedElsewhere) or not broke_a_connection(error):
            return error
        if (reason := self._first(0.5 if isinstance(error, LostRank) else WORD_S)) is None:
            reason = error
            if not isinstance(error, LostRank):
                reason = ConnectionLost(
                    "The connection to another rank has broken in mid-step, and none has told why: see which process "
                    f"has ended, and what it has printed. ({error})"
                )
            self.leave(reason)
        self._axes.break_off()
        return reason

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Where a connection breaks inside, what is raised is what the first rank that has failed has told."""
        try:
            yield
        except Exception as error:
            if (reason := self._reason_for(error)) is error:
                raise
            raise reason from error

    def _first(self, patience_s: float) -> Exception | None:
        """What another rank has told, waiting for it so long."""
        until = time.monotonic() + patience_s
        with contextlib.suppress(RuntimeError):
            while not default_store().check([self._key]):
                if time.monotonic() > until:
                    return None
                time.sleep(0.02)
            rank, kind, text = json.loads(default_store().get(self._key))
            if rank != dist.get_rank():
                return BY_NAME.get(kind, LostRank if kind == LostRank.__name__ else FailedElsewhere)(text)
        return None

    @property
    def _key(self) -> str:
        return f"{self._model}/{self._step}"


_MODELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many models have stages along a group, by the sizes of their mesh: as many on every rank."""


def broke_a_connection(error: Exception) -> bool:
    """Whether an exchange with another rank has failed: that is lost, does not answer in time, or NCCL or the store
    says so. What `lost_a_rank` knows is a part of it: of those, another rank has surely ended.
    """
    if lost_a_rank(error) or isinstance(error, ConnectionError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo/transport", "by peer"))
