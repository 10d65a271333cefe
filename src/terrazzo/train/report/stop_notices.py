"""What is said when a run is stopped: by its launcher, or by rank 0 if there is none."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.checkpoint import latest
from terrazzo.config import Config, without_passwords
from terrazzo.errors import BadInput
from terrazzo.files import is_url
from terrazzo.launch.stopping.notices import Notices
from terrazzo.telemetry.log.exit_note import forget_exit, overrule_exit
from terrazzo.train.checkpoints.local_folder import local_checkpoints
from terrazzo.train.checkpoints.restart_points import newest_of
from terrazzo.train.settings.run_command import RunCommand

__all__ = ["asked_text", "cut_short_text", "launcher_notices", "rank_notices"]


def launcher_notices(config: Config, command: RunCommand) -> Notices:
    """The notices of a launcher, which also notes in the run's folder how its ranks have ended."""
    return Notices(
        lambda trains: asked_text(config, trains=trains),
        lambda: cut_short_text(config, command),
        on_end=lambda note: overrule_exit(config.log.folder, note),
        on_restart=lambda: forget_exit(config.log.folder),
    )


def rank_notices(
    note_interrupted: Callable[[], object], read_config: Callable[[], Config], command: RunCommand
) -> Notices:
    """The notices of a rank without Terrazzo's launcher, which has to note itself that it was interrupted."""

    def cut_short() -> str:
        note_interrupted()
        return cut_short_text(read_config(), command)

    def asked(trains: bool) -> str:
        try:
            config = read_config()
        except BadInput:  # it is refused elsewhere, or was edited since the start
            config = Config()
        return asked_text(config, trains=trains)

    return Notices(asked, cut_short)


def asked_text(config: Config, *, trains: bool) -> str:
    """What happens next to a run that is asked to stop: it goes on to where it can be saved."""
    every = config.plan.round_steps
    if trains:
        until = f"at the end of this round of {every} steps" if every else "after this step"
        text = f"Stopping {until}, and saving a checkpoint."
    else:
        until = f"a round of {every} steps" if every else "one step"
        then = f"it takes {until}, saves a checkpoint and stops."
        text = f"Asked to stop while the run is set up: unless it is refused, {then}"
    return f"{text} Ctrl-C once more ends at once, without saving."


def cut_short_text(config: Config, command: RunCommand) -> str:
    """What is lost when a run is ended at once, what is left, and the command that continues from there."""
    folder, again = config.checkpoint_folder, command.going_on(config, finished=False)
    if is_url(folder):  # nothing is asked of a network now
        lost, how = f"steps after the newest checkpoint are lost; what was saved before stays in {folder}.", "To go on"
    elif (newest := _newest(config)) is not None:
        lost, how = f"steps after the newest checkpoint, {newest}, are lost.", "To go on from it"
    else:
        lost, how = "there is no checkpoint, and all steps are lost.", "To begin anew"
    return str(without_passwords(f"Ended at once, without saving: {lost} {how}: {again}"))


def _newest(config: Config) -> str | None:
    """The newest checkpoint on this machine, local ones included."""
    durable = latest(config.checkpoint_folder)
    return newest_of(durable, local_checkpoints(config, durable))
