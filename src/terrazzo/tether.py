"""Python that does not outlive its parent: `python tether.py PARENT -m MODULE ...`, or a FILE for the module.

A process that asks for its parent after seconds of imports may be told of whoever has adopted it meanwhile. So the
parent says its number itself, and this file is run by its path, before anything of the package is imported.
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
"""The parent of this process, read as early as the package can."""

_PR_SET_PDEATHSIG = 1
_WATCH_EVERY_S = 0.5


def tethered(*arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command of a Python process that ends with this one: `arguments` are `-m`, a module and its own, or a file's.

    On Linux it ends with the thread that starts it: use the main one.
    """
    return [sys.executable, *flags, os.path.abspath(__file__), str(os.getpid()), *arguments]


def interpreter_flags() -> tuple[str, ...]:
    """The options that this interpreter itself was started with, such as `-u -X dev -W error`, to start another one so.

    `-i` is left out: what is started in the background has no terminal to go on at.
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
    """Have this process killed when its parent ends; end it now where that has happened already."""
    tied = sys.platform == "linux" and _kernel_kills()
    if os.getppid() != parent:  # asked for after the kernel was told: nothing happens unseen between the two
        os._exit(1)
    if not tied:  # a daemon that exit may cut off: it sleeps and asks, and this file imports nothing of the package
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="terrazzo-tether").start()


def _kernel_kills() -> bool:
    """Whether the kernel will kill this process when its parent ends, from now on."""
    import ctypes  # others can do without

    number = ctypes.c_ulong(signal.SIGKILL)
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_EVERY_S)
    os._exit(1)


def become(arguments: list[str]) -> None:
    """Run `-m`, a module and its arguments, or a file and its own, as `python` would have run them in this process."""
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
