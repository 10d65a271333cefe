"""What a run continues from when its ranks are started again after a failure: the newest of its own checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.checkpoint import latest, open_source, step_of
from terrazzo.config import Config, without_passwords
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.launch.launcher.rank_slots import slots_of
from terrazzo.launch.launcher.restart_policy import RestartPoint, RestartPolicy
from terrazzo.telemetry import RunConsole
from terrazzo.train.checkpoints.local_folder import local_checkpoints, noted_run

__all__ = ["newest_of", "restarts_of"]


def restarts_of(config: Config, words: list[str]) -> RestartPolicy:
    """The restart policy of a run that is about to start as ranks of `python WORDS`."""
    points = _RestartPoints(config)

    def words_from(saved: RestartPoint) -> list[str]:
        goes_on = points.begins_anew and saved.path
        return [*words, "checkpoint.resume=if_exists"] if goes_on else words

    return RestartPolicy(config.launch.restarts, points.newest, words_from, RunConsole().say, slots_of(config))


class _RestartPoints:
    """Finds the run's own checkpoints in its folders, as opposed to those of earlier runs.

    Attributes:
        begins_anew: whether the run ignores existing checkpoints (`checkpoint.resume=never`).
    """

    def __init__(self, config: Config) -> None:
        self._config, self._folder = config, config.checkpoint_folder
        self.begins_anew = config.checkpoint.resume == "never"
        self._before = latest(self._folder)
        self._identity = _identity(self._before) if self.begins_anew else ""
        self._run_before = noted_run(config) if self.begins_anew else ""

    def newest(self) -> RestartPoint:
        """The newest of the run's own checkpoints; `RestartPoint()` if there is none yet.

        Raises:
            BadInput: the one that it began from is gone.
        """
        durable = self._durable()
        path = newest_of(durable, self._local(durable))
        return RestartPoint() if path is None else RestartPoint(step_of(path) or 0, str(without_passwords(path)))

    def _durable(self) -> str | None:
        path = latest(self._folder)
        if self.begins_anew:  # another run's may still have to be removed
            return None if path is not None and _identity(path) == self._identity else path
        if path is None and self._before is not None:
            raise BadInput(f"'{self._folder}' held a checkpoint when this run began, and holds none now: put it back")
        return path

    def _local(self, durable: str | None) -> list[str]:
        """Newer ones than the durable one on this host; none while the last run noted there is an earlier one."""
        if durable is None and self.begins_anew and noted_run(self._config) == self._run_before:
            return []
        return local_checkpoints(self._config, durable)


def newest_of(durable: str | None, local: Sequence[str]) -> str | None:
    """What a run goes on from: the last of the `local` checkpoints that are newer than the `durable` one, or that."""
    return local[-1] if local else durable


def _identity(path: str | None) -> str:
    """A string that identifies a checkpoint's content; its path if that cannot be read."""
    try:
        return "" if path is None else open_source(path).identity
    except TerrazzoError:
        return str(path)
