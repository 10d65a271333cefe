"""`terrazzo train` as one rank, from its start to its exit code: join the others, agree, open the session, train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from terrazzo.config import Config, LaunchConfig, load_config
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.exchange import on_first, together
from terrazzo.exit_codes import PREEMPTED
from terrazzo.launch.launcher_pipe import REPORT, Milestone
from terrazzo.launch.rank.process_group import Ranks, agree_on_config, join
from terrazzo.launch.rank.rank_process import RankProcess
from terrazzo.launch.rank.restart_note import refuse_restarts, take_restart_note
from terrazzo.launch.stopping.ending_at_once import ended_at_once
from terrazzo.launch.stopping.notices import ENDED_BEFORE_TRAINING, Notices, say_now
from terrazzo.launch.stopping.preemption import STAYS_STOPPED, stays_stopped
from terrazzo.launch.stopping.stop_request import StopRequest
from terrazzo.telemetry import FlightRecorder
from terrazzo.telemetry.log.exit_note import forget_exit
from terrazzo.telemetry.watchdog.rank_progress import LEFT
from terrazzo.telemetry.watchdog.recording import open_flight_recorder
from terrazzo.telemetry.watchdog.watchdog import Patience
from terrazzo.telemetry.watchdog.watched_rank import look_after
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.preflight import check
from terrazzo.train.report.stop_notices import rank_notices
from terrazzo.train.session.build_session import open_session
from terrazzo.train.session.session import Session
from terrazzo.train.settings.run_command import RunCommand

__all__ = ["train_as_rank"]

_NOBODY_LOOKS = (
    "Nobody looks after ranks that stand still, as launch.stall_s has it: this system does not show processes to each"
    " other. They wait for each other for launch.timeout_s."
)


def train_as_rank(path: Path, overrides: list[str], command: RunCommand | None = None) -> NoReturn:
    """Train as the rank that the environment says this process is, and end the process with the exit code.

    Args:
        command: the command that continues the run; default: that of the launcher, if Terrazzo's has started this rank.
    """
    launched = REPORT in os.environ  # by `start_training`, which says what there is to say of a stop
    command = command or (RunCommand(path, overrides) if launched else RunCommand())
    rank = int(os.environ["RANK"])
    process = RankProcess(rank)
    notices = rank_notices(process.note_interrupted, lambda: load_config(path, overrides), command)
    announced = notices if rank == 0 and not launched else None
    process.run(lambda: _RankOfRun(process, path, overrides, command, launched).train(announced))


@dataclass(frozen=True)
class _RankOfRun:
    """What a rank was started with.

    Attributes:
        command: the command that continues the run.
        launched: whether `start_training` has started this rank, which also restarts ranks.
    """

    process: RankProcess
    path: Path
    overrides: list[str]
    command: RunCommand
    launched: bool

    def train(self, notices: Notices | None) -> int:
        """Run this rank to its end; returns its exit code. Ranks read a file each: an error in one is raised on all.

        Args:
            notices: what to say of a stop, if this rank announces it.
        """
        restart = take_restart_note()
        ranks = self._join()
        stop = StopRequest(notices)
        self.process.reach(Milestone.READY)
        if stays_stopped():
            return _stay_stopped(ranks)
        flight_recorder = open_flight_recorder(ranks.rank, ranks.world_size)
        flight_recorder.events.phase("setup")
        config = together(self._config, TerrazzoError)
        agree_on_config(config)
        if not self.launched:
            refuse_restarts(config.launch)
        notes = together(lambda: check(config, ranks.world_size), TerrazzoError)
        with open_session(config, ranks, notes, restart, lambda: self._claim_folders(config)) as session:
            self._announce_steps(session, stop)
            with _looked_after(session, flight_recorder):
                code = TrainingLoop(session, stop, self.command, self._step_end(flight_recorder)).run()
        self.process.asked = stop.requested  # of others alone, such as those of a machine that is taken away
        dist.destroy_process_group()
        return code

    def _join(self) -> Ranks:
        """Join the others. Until they have come there is nothing to lose, and a signal ends this process."""
        says = not self.launched and os.environ.get("LOCAL_RANK") == "0"  # else the launcher does, or a neighbour
        with ended_at_once(ENDED_BEFORE_TRAINING if says else None):
            return join(self._launch_section())

    def _config(self) -> Config:
        return load_config(self.path, self.overrides)

    def _launch_section(self) -> LaunchConfig:
        """The settings to join with. If this rank cannot read them, all ranks are told once they have met."""
        try:
            return self._config().launch
        except BadInput:
            return LaunchConfig()

    def _claim_folders(self, config: Config) -> None:
        """The folders are this run's now: remove the note of how an earlier run ended; this one's end is noted."""
        on_first(lambda: forget_exit(config.log.folder), BadInput)
        self.process.note_end_in(config.log.folder, lambda: None)

    def _announce_steps(self, session: Session, stop: StopRequest) -> None:
        """The run is set up: tell whoever started this rank, and note its end with the step from now on."""
        self.process.note_end_in(session.config.log.folder, lambda: session.step)
        self.process.reach(Milestone.TRAINING)
        stop.trains = True

    def _step_end(self, flight_recorder: FlightRecorder) -> Callable[[int], None]:
        """A function to call after each step: records it, and tells whoever started this rank of the first one."""

        def step_ended(step: int) -> None:
            flight_recorder.events.step_done(step)
            self.process.reach(Milestone.STEPPED)

        return step_ended


def _stay_stopped(ranks: Ranks) -> int:
    if ranks.is_first:
        say_now(STAYS_STOPPED)
    return PREEMPTED


@contextmanager
def _looked_after(session: Session, flight_recorder: FlightRecorder) -> Iterator[None]:
    """Within this context, what the rank does is recorded, and a launcher or warden sees whether it stands still."""
    config, ranks = session.config, session.ranks
    flight_recorder.follow(engine_of(session.model), config.log.folder)
    stop_looking = None
    if not flight_recorder.watched:
        stop_looking = look_after(flight_recorder, Patience(config.launch.stall_s, config.launch.timeout_s))
    if stop_looking is None and not flight_recorder.watched and ranks.world_size > 1 and ranks.is_first:
        say_now(_NOBODY_LOOKS)
    try:
        yield
    finally:
        flight_recorder.events.phase(LEFT)  # what is left may take long, and is not watched
        if stop_looking is not None:
            stop_looking()
        flight_recorder.close()
