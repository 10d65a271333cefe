"""Computes micro-batches of other ranks again, and finds ranks whose results differ from those of most."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from terrazzo.checkpoint.rng import capture_rng, restore_rng
from terrazzo.engine import engine_of, unused_gradients
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput, Corrupted
from terrazzo.exchange import gather_json
from terrazzo.planner.timing.calibration import processor
from terrazzo.train.data import Cursor
from terrazzo.train.model.experts import forget_load
from terrazzo.train.model.objectives import is_known
from terrazzo.train.session.session import Session
from terrazzo.train.settings.intervals import is_due
from terrazzo.train.steps.disagreement import RankAnswer, finding_of
from terrazzo.train.steps.step import train_on

__all__ = ["Replay"]


class Replay:
    """Compares, every so many steps, what ranks compute from the same data with the same weights.

    Each rank computes its own micro-batch and its neighbour's, so that r and r+1 both compute that of r. If two answers
    differ, all compute both again, and r+2 does too, if there are three ranks: the majority is right. Compared is a
    digest of each unit's gradients before ranks sum them. Nothing of it remains: generators, buffers and counters of
    experts are restored.

    Raises:
        BadInput: ranks have different processors, whose results may differ in their last bits.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._first = session.step + 1
        if session.config.guard.replay_every is not None:
            _require_alike(session)

    def due(self) -> bool:
        """Whether a replay is due: after the first step, which shows whether kernels are deterministic, and then
        regularly.
        """
        config, step = self._session.config, self._session.step
        every = config.guard.replay_every
        return every is not None and (step == self._first or is_due(config.plan, step, every))

    def check(self) -> None:
        """Raise `Corrupted` on all ranks if one computes wrongly. Collective."""
        readers, self._from = self._session.share.readers, self._known_from()
        answers = self._answers([0, 1] if readers > 1 else [0, 0])
        if finding_of(answers) is None:
            return
        answers += self._answers(list(range(min(readers, 3))))
        finding = finding_of(answers)
        assert finding is not None, "answers do not change"
        if finding.of_kernels:
            raise BadInput(
                f"guard.replay_every compares what ranks compute of the same data, and they do not compute the same"
                f" twice: {finding.text} Kernels here add in any order. Set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the"
                " environment if it is not, train.compile=false, or guard.replay_every=null."
            )
        hosts = gather_json(platform.node())
        ranks = sorted({answer.rank for answer in answers})
        where = f" Hosts of ranks {ranks[0]} to {ranks[-1]}: {', '.join(hosts)}." if len(set(hosts)) > 1 else ""
        raise Corrupted(
            f"In a replay behind step {self._session.step}: {finding.text}{where} Processors and memory do that where"
            " they fail."
        )

    def _known_from(self) -> Cursor | None:
        """Where to read micro-batches; None for the run's own position. Collective if there is a reference model.

        After the last step of DPO the references of the next pairs are not known, so that gradients would be NaN on all
        ranks alike. Then the pairs with which the run began are taken again.
        """
        session = self._session
        if not session.config.objective.kind.against_initial:
            return None
        known = is_known(session.loader.first_of(session.share.reader))
        return None if all(gather_json(known)) else Cursor()

    def _answers(self, offsets: Sequence[int]) -> list[RankAnswer]:
        """The answers of all ranks to the micro-batches of the ranks `offsets` places before them. Collective."""
        with self._unnoticed():
            own = [self._answer(offset) for offset in offsets]
        return [
            RankAnswer(rank, tuple(of), tuple(units), tuple(tuple(each) for each in units.values()))
            for rank, told in enumerate(gather_json(own))
            for of, units in told
        ]

    def _answer(self, offset: int) -> tuple[list[int], dict[str, list[int]]]:
        """A key of the micro-batch, equal for ranks with the same part of it, and the digests by unit. Collective."""
        session, mesh = self._session, self._session.config.plan.mesh
        reader = (session.share.reader - offset) % session.share.readers
        part = session.ranks.rank % mesh.ranks_per_batch
        torch.manual_seed(session.seed_from(session.step, drawer=1_009 * reader + part // mesh.tp))
        batch = session.loader.first_of(reader, self._from)
        with unused_gradients(engine_of(session.model)) as unused:
            train_on(session, [batch], denominator=1.0)
        return [reader, part], unused.digests()

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Within this context computing leaves no trace in the run."""
        session = self._session
        generators, denominator = capture_rng(), engine_of(session.model).progress.denominator.chosen
        buffers = [(buffer, buffer.clone()) for buffer in session.model.buffers()]
        try:
            with devices.deterministic(session.ranks.device):
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            forget_load(session.model)
            session.model.set_gradient_denominator(denominator)  # type: ignore[operator]
            restore_rng(generators)


def _require_alike(session: Session) -> None:
    """Raise `BadInput` if ranks differ such that results may differ although nothing is wrong. Collective."""
    own = [processor(session.ranks.device.type), torch.__version__, torch.get_num_threads()]
    for rank, theirs in enumerate(of_ranks := gather_json(own)):
        if theirs != of_ranks[0]:
            raise BadInput(
                f"guard.replay_every compares what ranks compute to the bit, and they are not alike: rank 0 has"
                f" {_description(of_ranks[0])}, rank {rank} {_description(theirs)}. Use machines of one kind, or"
                " guard.replay_every=null."
            )


def _description(told: Sequence[object]) -> str:
    name, version, threads = told
    return f"'{name}' with torch {version} and {threads} threads"
