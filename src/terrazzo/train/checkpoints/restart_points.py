"""What a run goes on from when its ranks are started again after a failure: the newest checkpoint that is its own."""

from __future__ import annotations

from terrazzo.checkpoint import latest, open_source, step_of
from terrazzo.config import Config, without_passwords
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.telemetry import RunConsole
from terrazzo.train.checkpoints.local_folder import local_checkpoints, noted_run
from terrazzo.train.launch.launcher.rank_slots import slots_of
from terrazzo.train.launch.launcher.restart_policy import RestartPoint, RestartPolicy

__all__ = ["restarts_of"]


def restarts_of(config: Config, words: list[str]) -> RestartPolicy:
    """What is done after failures of a run that is about to start as ranks of `python WORDS`."""
    points = _RestartPoints(config)

    def words_from(saved: RestartPoint) -> list[str]:
        goes_on = points.begins_anew and saved.path
        return [*words, "checkpoint.resume=if_exists"] if goes_on else words

    return RestartPolicy(config.launch.restarts, points.newest, words_from, RunConsole().say, slots_of(config))


class _RestartPoints:
    """The checkpoints in a run's folders, told from those that were there before it.

    Attributes:
        begins_anew: the run does not go on from what is there (`checkpoint.resume=never`).
    """

    def __init__(self, config: Config) -> None:
        self._config, self._folder = config, config.checkpoint_folder
        self.begins_anew = config.checkpoint.resume == "never"
        self._before = latest(self._folder)
        self._identity = _identity(self._before) if self.begins_anew else ""
        self._run_before = noted_run(config) if self.begins_anew else ""

    def newest(self) -> RestartPoint:
        """The newest of the run's own; `RestartPoint()` where there is none yet.

        Raises: `BadInput` where the one that it has begun from is gone.
        """
        durable = self._durable()
        path = next(reversed(self._local(durable)), durable)
        return RestartPoint() if path is None else RestartPoint(step_of(path) or 0, str(without_passwords(path)))

    def _durable(self) -> str | None:
        path = latest(self._folder)
        if self.begins_anew:  # another run's may still have to be removed
            return None if path is not None and _identity(path) == self._identity else path
        if path is None and self._before is not None:
            raise BadInput(f"'{self._folder}' held a checkpoint when this run began, and holds none now: put it back")
        return path

    def _local(self, durable: str | None) -> list[str]:
        """Newer ones than the durable one on this host; none as long as the run before is the last one noted there."""
        if durable is None and self.begins_anew and noted_run(self._config) == self._run_before:
            return []
        return local_checkpoints(self._config, durable)


def _identity(path: str | None) -> str:
    """What tells a checkpoint's contents from others; its path where they cannot be read."""
    try:
        return "" if path is None else open_source(path).identity
    except TerrazzoError:
        return str(path)
