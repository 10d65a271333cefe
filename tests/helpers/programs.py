"""Python programs, started as forks of a server that has imported torch: two seconds of computing less for each.

`run` and `Program` are `subprocess.run` and `Popen` of what would stand behind `python`; `on_ranks` is torchrun. Each
program is the `__main__` of a process of its own, with arguments, environment, folder and output of its own. What the
interpreter does first and last is not as in a fresh one: tests of that use `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

from terrazzo.launch.launcher_pipe import REPORT
from terrazzo.telemetry.watchdog.watched_rank import TASK
from tests.helpers.forkserver import spawning_by_fork
from tests.helpers.untraced import PLANNED, leave_out_traces

__all__ = ["Program", "on_ranks", "run"]

Done = subprocess.CompletedProcess[str]


class Program:
    """`python WORDS`, begun. `words` are a file or `-m` and a module or `-c` and code, and arguments.

    `merged`: it has one pipe for both, as behind `2>&1`, and `stderr` stays empty.
    """

    def __init__(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] = os.environ, merged: bool = False
    ) -> None:
        self.words = words
        (self.stdout, out), (self.stderr, err) = _pipe(), _pipe()
        arguments = (words, str(cwd or os.getcwd()), dict(env), out, out if merged else err)
        self._process = mp.get_context("spawn").Process(target=_main, args=arguments, daemon=True)
        with spawning_by_fork():
            self._process.start()
        out.close()
        err.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """As `wait` returns, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """The exit code, negative for a signal. Raises `subprocess.TimeoutExpired`, with the program killed."""
        self._process.join(timeout_s)
        code: int | None = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self.words, timeout_s)
        return code

    def communicate(self, timeout_s: float = 150.0) -> Done:
        """All that it still says, and how it ended. Raises `subprocess.TimeoutExpired`, with what it has said."""
        with ThreadPoolExecutor(2) as readers:
            out, err = (readers.submit(pipe.read) for pipe in (self.stdout, self.stderr))
            try:
                code = self.wait(timeout_s)
            except subprocess.TimeoutExpired as late:
                late.output, late.stderr = out.result(), err.result()
                raise
            finally:
                wait([out, err])
                self.close()
        return Done(self.words, code, out.result(), err.result())

    def close(self) -> None:
        """No more is read."""
        self.stdout.close()
        self.stderr.close()


def run(*words: str, cwd: Path | None = None, env: Mapping[str, str] = os.environ, timeout_s: float = 150.0) -> Done:
    """`python WORDS` to its end. Raises `subprocess.TimeoutExpired`."""
    return Program(*words, cwd=cwd, env=env).communicate(timeout_s)


def on_ranks(ranks: int, *words: str, cwd: Path | None = None, timeout_s: float = 150.0) -> list[Done]:
    """`torchrun --nproc-per-node RANKS WORDS` to its end, rank by rank. Raises `subprocess.TimeoutExpired`."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun has one for its ranks
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    environments = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    programs = [Program(*words, cwd=cwd, env=environment) for environment in environments]
    deadline = time.monotonic() + timeout_s
    with ThreadPoolExecutor(ranks) as waiting:
        return list(waiting.map(lambda program: program.communicate(deadline - time.monotonic()), programs))


def _pipe() -> tuple[IO[str], Connection]:
    """What the parent reads, and what the child writes to."""
    ours, theirs = os.pipe()
    return os.fdopen(ours), Connection(theirs, readable=False)


def _main(words: tuple[str, ...], folder: str, environment: dict[str, str], out: Connection, err: Connection) -> None:
    for descriptor, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), descriptor)
    for pipe in (out, err):
        pipe.close()
    mp.current_process().daemon = False  # it ends with the test's process, and may start others
    mp.set_start_method(None, force=True)  # the default
    subprocess.Popen = Popen  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    leave_out_traces()
    _run(list(words))


def _run(words: list[str]) -> None:
    """As the interpreter runs its command line, and ends. Raises: `SystemExit`."""
    try:
        _execute(words)
    except SystemExit:
        raise
    except BaseException:
        kind, error, trace = sys.exc_info()
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:  # the interpreter has no frames
            trace = trace.tb_next
        sys.excepthook(kind, error, trace)  # type: ignore[arg-type]
        sys.exit(1)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


class Popen(subprocess.Popen[Any]):
    """In a program: ranks that Terrazzo's launcher or Lightning's starts are forks, and so is who looks after them."""

    def __init__(self, args: Any, *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        if env is not None and (REPORT in env or TASK in env or _is_of_lightning(args, env)):
            words = [word for word in args[1:] if word != "-P"]
            used = OF_LAUNCHERS if REPORT in env and TASK not in env else ALL
            options["preexec_fn"] = functools.partial(_become, words, env, options.get("pass_fds", ()), used)
            sys.stdout.flush()
            sys.stderr.flush()
        super().__init__(args, env=env, **options)


def _is_of_lightning(args: Any, environment: Mapping[str, str]) -> bool:
    """Whether it is another rank of this script; only Lightning counts nodes under this name."""
    other = environment.get("LOCAL_RANK") != os.environ.get("LOCAL_RANK")
    return args[0] == sys.executable and "NODE_RANK" in environment and other


def _become(words: list[str], environment: Mapping[str, str], kept: Collection[int], used: Collection[str]) -> None:
    """In the place of `exec`: run what stands behind `python`, with packages of its own for those in use, and end."""
    os.environ.clear()
    os.environ.update(environment)
    last = 3
    for descriptor in sorted(kept):
        os.closerange(last, descriptor)
        last = descriptor + 1
    os.closerange(last, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget(used)
    code = 1
    try:
        if "train" in words:
            import_module(PLANNED)
            leave_out_traces()
        _run(words)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


ALL = ("terrazzo",)
OF_LAUNCHERS = tuple(f"terrazzo.{name}" for name in ("cli", "integrations", "telemetry", "train"))
"""What a launcher keeps something in. The rest, which imports none of it and takes 0.7 s, is as it was imported."""


def _forget(packages: Collection[str]) -> None:
    """Their modules, and what they have torch call for every module, parameter and step of the process."""
    gone = [name for name in sys.modules if any(name == each or name.startswith(f"{each}.") for each in packages)]
    for name in gone:
        del sys.modules[name]
        above, _, last = name.rpartition(".")
        if above in sys.modules:
            vars(sys.modules[above]).pop(last, None)
    tables = (
        torch_modules._global_module_registration_hooks,
        torch_modules._global_parameter_registration_hooks,
        torch_optimizers._global_optimizer_pre_hooks,
    )
    for table in tables:
        for number in [number for number, hook in table.items() if hook.__module__ in gone]:
            del table[number]
    if (tether := sys.modules.get("terrazzo.processes.tether")) is not None:
        tether.PARENT = os.getppid()  # type: ignore[attr-defined]


def _execute(words: list[str]) -> None:
    """As the interpreter does with its command line."""
    if words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(module))
    else:
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).parent)]
        runpy.run_path(words[0], run_name="__main__")
