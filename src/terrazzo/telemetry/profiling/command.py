"""`terrazzo profile`: starts a script with the probe in each of its Python processes, and passes on signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from terrazzo.errors import BadInput
from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.telemetry.log.sinks import JsonLines

if TYPE_CHECKING:
    from terrazzo.telemetry.profiling.merging import StepMerger

__all__ = ["ProfiledScript", "profile"]

_HOOK = Path(__file__).parent / "hook"
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_FROM_PROCESS = 0
"""`si_code` of a signal that was sent by `kill`. A terminal's signals reach all of its processes by themselves."""

_EVERY_S = 0.5
_SENTINEL_S = 0.5
"""Seconds for the sentinel to end by a signal, if it was sent one too."""


class ProfiledScript(NamedTuple):
    """How a script ended.

    Attributes:
        code: its exit code; 128 plus the number of a signal that ended it.
        steps: how many were recorded.
        own: the folder of the records that the script itself writes by Terrazzo, if it does.
    """

    code: int
    steps: int
    own: Path | None


def profile(command: Sequence[str], folder: Path) -> ProfiledScript:
    """Run the command with the probe in each Python that it starts, and write records of its steps meanwhile.

    Args:
        command: its words, such as `python train.py` or `torchrun --nproc-per-node 2 train.py`.
        folder: gets `metrics.jsonl`, `script.json` and a file for each rank in `ranks`; must not have records yet.

    Raises:
        BadInput: the folder has records, or cannot be written; the command does not exist, or is no program.
    """
    if shutil.which(command[0]) is None:
        raise BadInput(f"There is no command '{command[0]}': write what starts the script, such as python train.py.")
    there, ranks = RunFolder(folder), RunFolder(folder.absolute()).ranks
    if there.metrics.exists():
        raise BadInput(f"'{folder}' has records of an earlier run: name another folder by --out, or remove it.")
    try:
        ranks.mkdir(parents=True, exist_ok=True)
        sink = JsonLines(there.metrics)
    except OSError as error:
        raise BadInput(f"'{folder}' cannot be written ({error.strerror or error}): name another by --out.") from error
    merging = _LateMerger(ranks, sink)
    try:
        code = _run(command, {"TERRAZZO_PROFILE": str(ranks)}, merging.merge)
    except BadInput:
        sink.close()
        there.metrics.unlink()  # so that the folder can be used for the command as it should be
        raise
    merging.merge(at_end=True)
    sink.log("end", merging.made, {})
    sink.close()
    try:
        there.script.write_text(json.dumps(merging.facts))
    except OSError as error:
        say_on_stderr(f"'{there.script}' cannot be written ({error.strerror or error}): the advice will be general.")
    own = merging.facts.get("own")
    return ProfiledScript(code, merging.made, Path(own) if own else None)


class _LateMerger:
    """A `StepMerger` made only once the script has written something: it imports torch, and the script shall not wait.

    Attributes:
        facts: of the script, as `StepMerger` has them.
        made: how many steps are in records.
    """

    def __init__(self, ranks: Path, sink: JsonLines) -> None:
        self._ranks, self._sink = ranks, sink
        self._merger: StepMerger | None = None
        self.facts: dict[str, Any] = {}
        self.made = 0

    def merge(self, at_end: bool = False) -> None:
        """Write the new records; `at_end` as for `StepMerger.new`."""
        if self._merger is None:
            if not any(self._ranks.iterdir()):
                return
            from terrazzo.telemetry.profiling.merging import StepMerger

            self._merger = StepMerger(self._ranks)
        for step, record in self._merger.new(at_end):
            self._sink.log("step", step, record)
        self.facts, self.made = self._merger.facts, self._merger.made


class _Sentinel:
    """A process in this one's process group that any signal ends: it shows whether the whole group was sent one.

    The script has had such a signal itself. If it was passed on, one Ctrl-C would be two, which ends a run without a
    checkpoint.

    Args:
        mask: the signal mask of the process.
    """

    def __init__(self, mask: Collection[int]) -> None:
        self._mask = mask
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start it. It also ends when this process does, which holds the other end of its input."""
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, preexec_fn=self._listen)

    def _listen(self) -> None:
        """Heed all signals: a command started with `&` or `nohup` ignores some, and the sentinel would too."""
        for each in _PASSED_ON:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def had_signal(self) -> bool:
        """Whether the process group has been sent a signal since the last call."""
        try:
            self._process.wait(_SENTINEL_S)
        except subprocess.TimeoutExpired:
            return False
        self.__exit__()
        self._process = self._started()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _run(command: Sequence[str], variables: dict[str, str], meanwhile: Callable[[], None]) -> int:
    """Run the command; returns its exit code. Signals sent to this process alone are passed on to it."""
    path = os.pathsep.join([str(_HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | variables | {"PYTHONPATH": path}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    sys.stdout.flush()
    try:
        with _Sentinel(before) as sentinel:
            child = _started(command, environment, before)
            while child.poll() is None:
                info = signal.sigtimedwait(_PASSED_ON | {signal.SIGCHLD}, _EVERY_S)
                if info is None:
                    meanwhile()
                elif info.si_signo != signal.SIGCHLD and not sentinel.had_signal() and info.si_code <= _FROM_PROCESS:
                    child.send_signal(info.si_signo)
        while signal.sigtimedwait(_PASSED_ON, 0) is not None:  # a second Ctrl-C was for the script, which has ended
            pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _started(command: Sequence[str], environment: dict[str, str], mask: Collection[int]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, env=environment, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        )
    except OSError as error:  # such as ENOEXEC
        raise BadInput(
            f"'{command[0]}' cannot be started ({error.strerror or error}): write the program that runs it too, such as"
            f" python {command[0]}, or begin the file with a line such as #!/usr/bin/env python."
        ) from error
