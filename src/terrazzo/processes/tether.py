"""Runs Python so that it does not outlive its parent: `python tether.py PARENT_PID -m MODULE ...`, or FILE for -m.

A process that asks for its parent only after seconds of imports may get the pid of another one that has adopted it. So
the parent gives its own pid, and this file is run by its path, before anything of the package is imported.
"""

from __future__ import annotations

import io
import os
import pkgutil
import signal
import sys
import threading
import time
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import CodeType

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
    """Run `-m`, a module and its arguments, or a file and its arguments, in this process, as `python` would.

    `runpy` takes the `__main__` that it has made back at the last line, while threads may go on: here it stays.
    """
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else list(arguments)
    target = sys.argv[0]
    importer = None if is_module else pkgutil.get_importer(os.path.abspath(target))  # of a folder, or an archive
    if not sys.flags.safe_path:  # whatever was run first gives way to what Python itself would have put there
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    if importer is not None:
        sys.path[: 0 if sys.flags.safe_path else 1] = [os.path.abspath(target)]
        spec, code = _in_module("__main__", importer.find_spec("__main__"))
    elif is_module:
        spec, code = _of_module(target)
        sys.argv[0] = str(spec.origin)
    else:
        spec, code = _of_file(target)
    main = module_from_spec(spec)
    if spec.name == "__main__" and importer is None:  # a file is no module to anybody
        main.__package__ = main.__spec__ = None
    main.__name__ = "__main__"
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _of_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and the code of what `-m` runs: of a package its `__main__`."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = find_spec(name)
    return _in_module(name, spec)


def _in_module(name: str, spec: ModuleSpec | None) -> tuple[ModuleSpec, CodeType]:
    """The spec of a module, and its code.

    Raises:
        ImportError: there is none.
    """
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if spec is None or code is None:
        raise ImportError(f"No module named {name}" if spec is None else f"No code object available for {name}")
    return spec, code


def _of_file(path: str) -> tuple[ModuleSpec, CodeType]:
    """The same of a file. Its path is absolute from here on: a script may change the folder."""
    path = os.path.abspath(path)
    if path.endswith(".pyc"):
        return _in_module(
            "__main__", spec_from_file_location("__main__", path, loader=SourcelessFileLoader("__main__", path))
        )
    spec = spec_from_file_location("__main__", path, loader=SourceFileLoader("__main__", path))
    assert spec is not None
    with io.open_code(path) as file:
        return spec, compile(file.read(), path, "exec", dont_inherit=True)


def _main() -> None:
    _, parent, *rest = sys.argv
    tie(int(parent))
    become(rest)


if __name__ == "__main__":
    _main()
