"""Renders chat templates, which are programs of strangers, in a process of their own that can be stopped.

The sandbox of transformers keeps a template from files and from Python's insides, and lets it loop and multiply for as
long as it likes. Here a rendering has so many seconds of processor time, and the process so much memory; what ends it
is an error of that conversation. `main` is the program of that process: requests and answers are JSON, on a connection
of `multiprocessing`.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

__all__ = ["Failed", "render"]

MAX_SECONDS = 10.0
"""The limit of processor time for one conversation. An ordinary one takes a millisecond."""
MAX_BYTES = 1 << 30
"""The limit of memory, beyond what the process has when it is ready."""
MAX_CHARACTERS = 1 << 26
IDLE_S = 20
"""Seconds without a request after which the process ends; the next request starts another."""


class Failed(Exception):
    """A template that failed, or was stopped. `line` is the template's, where it is no template at all."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


def render(request: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the ranges of characters that the template marks as the assistant's.

    Args:
        request: arguments of transformers' `render_jinja_template`, and the `messages` of one conversation. What JSON
            cannot hold becomes the name of its type, as there.

    Raises:
        Failed: the template raised an error, or took too much time or memory.
        KeyboardInterrupt: Ctrl-C ended the process that renders, which gets it as well.
    """
    request = {**request, "max_seconds": MAX_SECONDS}
    with _lock:
        answer = _ask(json.dumps(request, default=lambda value: f"<{type(value).__name__}>").encode())
    if "error" in answer:
        raise Failed(answer["error"], answer["line"])
    return answer["text"], [(start, stop) for start, stop in answer["spans"]]


_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None
_line: Connection


def _ask(request: bytes) -> dict[str, Any]:
    global _process, _line
    for _ in range(2):  # one that was idle may be about to end
        if _process is None or _process.poll() is not None:
            _end()
            _process, _line = _start()
        process, line = _process, _line  # another thread may end it meanwhile, and then lets go of it
        try:
            line.send_bytes(request)
            answer: dict[str, Any] = json.loads(line.recv_bytes())
            return answer
        except (EOFError, OSError):  # it has ended
            pass
        except BaseException:  # interrupted between request and answer: the next one must not get it
            _end()
            raise
        code = process.wait()
        _end()
        if code == -signal.SIGINT:
            raise KeyboardInterrupt
        if code:
            return {"error": _REASONS.get(code, f"the process that renders ended with exit code {code}"), "line": None}
    return {"error": "the process that renders could not be started", "line": None}


_REASONS = {
    -signal.SIGPROF: "it was still being rendered when its processor time was over, and was stopped",
    -signal.SIGKILL: "the process that renders was killed",
}


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    ours, theirs = Pipe()
    with theirs:
        # As a file: it needs neither torch nor terrazzo.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), str(theirs.fileno())]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=nothing, stdout=2, env=environment, pass_fds=[theirs.fileno()]), ours


@atexit.register
def _end() -> None:
    """Let go of the process, whether it has ended or not."""
    global _process
    process, _process = _process, None
    if process is not None:
        process.kill()
        _line.close()
        process.wait()


def main() -> None:
    """Answer requests until their connection ends, or none has come for a while."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    # What the parent ignores or blocks would be so here as well, and nothing would end a rendering.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGPROF, signal.SIGALRM})
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    line = Connection(int(sys.argv[1]))
    while True:
        signal.alarm(IDLE_S)
        try:
            request = line.recv_bytes()
        except (EOFError, OSError):
            return
        signal.alarm(0)
        arguments = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, arguments.pop("max_seconds"))  # SIGPROF ends a process wherever it is
        answer = _answer(render_jinja_template, arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        line.send_bytes(answer)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) if sys.platform == "linux" else 0
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _answer(work: Any, arguments: dict[str, Any]) -> bytes:
    try:
        (text,), spans = work(conversations=[arguments.pop("messages")], **arguments)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"its text has {len(text):,} characters, and at most {MAX_CHARACTERS:,} are taken")
        return json.dumps({"text": text, "spans": spans[0] if spans else []}).encode()
    except MemoryError:
        return json.dumps({"error": f"it took more than {MAX_BYTES >> 30} GiB of memory", "line": None}).encode()
    except Exception as error:  # templates raise what they like
        message = f"{type(error).__name__}: {error}"[:2000]
        return json.dumps({"error": message, "line": getattr(error, "lineno", None)}).encode()


if __name__ == "__main__":
    main()
