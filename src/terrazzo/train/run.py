"""`terrazzo train` from its arguments to its exit code: refuse, launch or join, train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from terrazzo.checkpoint import latest, open_source
from terrazzo.checkpoint.storage.store import step_of
from terrazzo.config import Config, LaunchConfig, load_config, without_passwords
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, TerrazzoError, counted
from terrazzo.exchange import on_first, together
from terrazzo.exit_codes import PREEMPTED
from terrazzo.telemetry import RunConsole
from terrazzo.telemetry.log.exit_note import forget_exit, overrule_exit
from terrazzo.telemetry.watchdog.rank_progress import LEFT
from terrazzo.telemetry.watchdog.recording import black_box
from terrazzo.telemetry.watchdog.watchdog import Patience
from terrazzo.telemetry.watchdog.watched_rank import look_after
from terrazzo.train.checkpoints.local_folder import local_checkpoints, noted_run
from terrazzo.train.launch.launcher import launch_ranks, launch_with_restarts
from terrazzo.train.launch.launcher_pipe import REPORT
from terrazzo.train.launch.machine import ranks_to_start, resolve_device, slots_of
from terrazzo.train.launch.notices import Notices, say_now
from terrazzo.train.launch.preemption import STAYS_STOPPED, stays_stopped
from terrazzo.train.launch.process_group import agree_on_config, join
from terrazzo.train.launch.rank_process import (
    announce_claim,
    announce_ready,
    announce_training,
    note_interrupted,
    run_rank,
)
from terrazzo.train.launch.restarts import Restarts, Saved, Start, refuse_restarts, take_restart_note
from terrazzo.train.launch.stop_signals import StopRequest
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.preflight import check
from terrazzo.train.session.build_session import open_session
from terrazzo.train.settings.command import Command

__all__ = ["start_training", "train_as_rank"]

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def start_training(config: Config, path: Path, overrides: list[str]) -> int:
    """The exit code of `terrazzo train PATH OVERRIDES`, which `config` is. Alone, this process becomes the only rank.

    Raises:
        BadInput: found before any process was started.
    """
    command = Command(path, overrides)
    ranks = ranks_to_start(config)
    check(config, ranks)
    _check_fewer(config, ranks)
    RunConsole().say(f"starting {counted(ranks, f'{resolve_device(config.launch).upper()} rank')} ...")
    if ranks == 1 and not config.launch.restarts:
        os.environ.update(ALONE, MASTER_ADDR="localhost", MASTER_PORT="0")
        train_as_rank(path, overrides, command)
    notices = Notices(
        asked=_ASKED,
        cut_short=lambda: _cut_short(config, command),
        asked_early=_ASKED_EARLY,
        ended=lambda ended: overrule_exit(config.log.folder, ended.note),
        again=lambda: forget_exit(config.log.folder),
    )
    words = ["-m", "terrazzo", "train", str(path), *overrides]
    patience = Patience(config.launch.stall_s, config.launch.timeout_s) if ranks > 1 else None
    if config.launch.restarts:
        return launch_with_restarts(Start(ranks, words), _restarts(config, words), notices, patience)
    return launch_ranks(ranks, words, notices=notices, patience=patience)


def train_as_rank(path: Path, overrides: list[str], command: Command | None = None) -> NoReturn:
    """This process trains as the rank that its environment says it is, and ends with the exit code.

    Args:
        command: by which the run goes on; default: that of the launcher, which others may be.
    """
    launched = REPORT in os.environ  # by `start_training`, which says what there is to say of a stop
    command = command or (Command(path, overrides) if launched else Command())
    rank = int(os.environ["RANK"])

    def cut_short() -> str:
        note_interrupted()
        return _cut_short(load_config(path, overrides), command)

    notices = Notices(_ASKED, cut_short, asked_early=_ASKED_EARLY)
    stop = StopRequest(notices if rank == 0 and not launched else None)
    run_rank(rank, lambda: _train_rank(path, overrides, command, stop, launched=launched))


_APART = (
    "Nobody looks after ranks that stand still, as launch.stall_s has it: this system does not show processes to each"
    " other. They wait for each other for launch.timeout_s."
)
_ASKED = "Stopping after this step, and saving a checkpoint. Ctrl-C once more ends at once, without saving."
_ASKED_EARLY = (
    "Asked to stop while the run is set up: unless it is refused, it takes one step, saves a checkpoint and stops."
    " Ctrl-C once more ends at once, without saving."
)


def _restarts(config: Config, words: list[str]) -> Restarts:
    """What is done after failures of a run that is about to start."""
    folder, anew = config.checkpoint_folder, config.checkpoint.resume == "never"
    before = latest(folder)
    identity, noted = (_identity(before), noted_run(config)) if anew else ("", "")

    def newest() -> Saved:
        path = latest(folder)
        if anew and path is not None and _identity(path) == identity:  # another run's, still to be removed
            path = None
        if path is None and before is not None and not anew:
            raise BadInput(f"'{folder}' held a checkpoint when this run began, and holds none now: put it back")
        local = [] if path is None and anew and noted_run(config) == noted else local_checkpoints(config, path)
        path = next(reversed(local), path)
        return Saved() if path is None else Saved(step_of(path.rpartition("/")[2]) or 0, str(without_passwords(path)))

    def following(saved: Saved) -> list[str]:
        goes_on = anew and saved.path
        return [*words, "checkpoint.resume=if_exists"] if goes_on else words

    places = slots_of(config)
    return Restarts(config.launch.restarts, newest, following, RunConsole().say, places)


def _check_fewer(config: Config, ranks: int) -> None:
    """Raise `BadInput` where there may be fewer ranks than `ranks` that cannot run this configuration."""
    fewer = [number for number in config.rank_numbers if number < ranks]
    for number in fewer:
        try:
            check(config, number)
        except BadInput as error:
            raise BadInput(
                f"launch.ranks is {config.launch.ranks}, and of {counted(number, 'rank')} it would be refused: {error}"
            ) from None


def _identity(path: str | None) -> str:
    """Of a checkpoint's contents, or its path where these cannot be read."""
    try:
        return "" if path is None else open_source(path).identity
    except TerrazzoError:
        return str(path)


def _cut_short(config: Config, command: Command) -> str:
    """What is lost with a run that is ended at once, what is left, and how to go on from there."""
    folder, again = config.checkpoint_folder, command.going_on(config, finished=False)
    newest = folder if "://" in folder else latest(folder)  # nothing is asked of a network now
    lost, how = "there is no checkpoint, and all steps are lost.", "To begin anew"
    if newest is not None:
        lost, how = f"steps after the newest checkpoint, {newest}, are lost.", "To go on from it"
    return str(without_passwords(f"Ended at once, without saving: {lost} {how}: {again}"))


def _train_rank(path: Path, overrides: list[str], command: Command, stop: StopRequest, *, launched: bool) -> int:
    """One rank's whole life; its exit code. What is wrong on one is raised on all: each reads its own file.

    Args:
        launched: by this command, which starts ranks again where that is asked for.
    """
    restart = take_restart_note()
    announce_ready()
    ranks = join(_launch_of(path, overrides))
    if stays_stopped():
        if ranks.is_first:
            say_now(STAYS_STOPPED)
        return PREEMPTED
    box = black_box(ranks.rank, ranks.world_size)
    box.recorder.phase("setup")
    config = together(lambda: load_config(path, overrides), TerrazzoError)
    agree_on_config(config)
    if not launched:
        refuse_restarts(config.launch)
    notes = together(lambda: check(config, ranks.world_size), TerrazzoError)

    def claimed() -> None:
        on_first(lambda: forget_exit(config.log.folder), BadInput)
        announce_claim(config.log.folder, lambda: None)

    with open_session(config, ranks, notes, claimed) as session:
        announce_claim(config.log.folder, lambda: session.step)
        announce_training()
        stop.trains = True
        session.origin.restart = restart
        box.follow(engine_of(session.model), config.log.folder)
        patience = Patience(config.launch.stall_s, config.launch.timeout_s)
        leave = None if box.watched else look_after(box, patience)
        if leave is None and not box.watched and ranks.world_size > 1 and ranks.is_first:
            say_now(_APART)
        try:
            code = TrainingLoop(session, stop, command, box.recorder.step_done).run()
        finally:
            box.recorder.phase(LEFT)  # what is left to do may take long, and is not looked after
            if leave is not None:
                leave()
            box.close()
    dist.destroy_process_group()
    return code


def _launch_of(path: Path, overrides: list[str]) -> LaunchConfig:
    """What to join with; where this rank cannot read it, all hear of it once they have met."""
    try:
        return load_config(path, overrides).launch
    except BadInput:
        return LaunchConfig()
