"""Runs Python so that it does not outlive its parent: `python tether.py PARENT_PID -m MODULE ...`, or FILE for -m.

A process that asks for its parent only after seconds of imports may get the pid of another one that has adopted it. So
the parent gives its own pid, and this file is run by its path, before anything of the package is imported.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

__all__ = ["PARENT", "become", "interpreter_flags", "tethered", "tie"]

PARENT = os.getppid()
"""The pid of this process's parent, read as early as the package can."""

_PR_SET_PDEATHSIG = 1
_WATCH_EVERY_S = 0.5


def tethered(*arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command of a Python process that ends with this one.

    On Linux it ends with the thread that starts it: start it from the main thread.

    Args:
        arguments: `-m`, a module and its arguments, or a file and its arguments.
        flags: options for the interpreter.
    """
    return [sys.executable, *flags, os.path.abspath(__file__), str(os.getpid()), *arguments]


def interpreter_flags() -> tuple[str, ...]:
    """The options that this interpreter was started with, such as `-u -X dev -W error`, to start another one alike.

    `-i` is left out: a process in the background has no terminal for it.
    """
    flags: list[str] = []
    words = iter(sys.orig_argv[1:])
    for word in words:
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("--"):
            flags += [word, next(words)] if word == "--check-hash-based-pycs" else [word]
            continue
        letters = ""
        for place, letter in enumerate(word[1:], start=1):
            if letter in "cm":
                return (*flags, f"-{letters}") if letters else tuple(flags)
            if letter in "WX":
                value = word[place + 1 :] or next(words)
                flags += [f"-{letters}"] * bool(letters) + [f"-{letter}", value]
                letters = ""
                break
            letters += letter if letter != "i" else ""
        flags += [f"-{letters}"] * bool(letters)
    return tuple(flags)


def tie(parent: int) -> None:
    """Have this process killed when its parent ends; end it now if that has happened already."""
    tied = sys.platform == "linux" and _kernel_kills()
    if os.getppid() != parent:  # asked for after the kernel was told: nothing happens unseen between the two
        os._exit(1)
    if not tied:  # a daemon that exit may cut off: it sleeps and asks, and this file imports nothing of the package
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="terrazzo-tether").start()


def _kernel_kills() -> bool:
    """Ask the kernel to kill this process when its parent ends; returns whether it will."""
    import ctypes  # slow to import, and needed on Linux only

    number = ctypes.c_ulong(signal.SIGKILL)
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_EVERY_S)
    os._exit(1)


def become(arguments: list[str]) -> None:
    """Run `-m`, a module and its arguments, or a file and its arguments, in this process, as `python` would."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else list(arguments)
    if not sys.flags.safe_path:  # whatever was run first gives way to what Python itself would have put there
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[0]))
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _main() -> None:
    _, parent, *rest = sys.argv
    tie(int(parent))
    become(rest)


if __name__ == "__main__":
    _main()
