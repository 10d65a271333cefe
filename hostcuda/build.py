"""Builds the native library with a plain g++ against the installed torch: once per machine, in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

__all__ = ["Unbuildable", "library", "obstacle", "torch_libraries"]

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-Wall", "-D_GLIBCXX_USE_CXX11_ABI=1")


class Unbuildable(RuntimeError):
    """The device cannot be built here; the message says why."""


def obstacle() -> str | None:
    """Why the library cannot be built here, or None. Imports nothing of torch."""
    if shutil.which("g++") is None:
        return "the simulated CUDA device is built with g++, which is not here"
    root = _torch()
    if root is None or not (root / "include/ATen/ATen.h").exists():
        return "the simulated CUDA device is built against torch's headers, which are not here"
    if "+cpu" not in version("torch") and (root / "lib/libtorch_cuda.so").exists():
        return "the simulated CUDA device takes the place of a real one: it needs a torch without CUDA"
    return None


def library(cache: Path | None = None) -> Path:
    """The library, built if it is not there yet; other processes that ask meanwhile wait for it.

    Args:
        cache: the folder that the build's folder is in. If not given, the user's cache, where other trees find what is
            built of the same sources; `build/` beside this package where that cannot be written.

    Raises: `Unbuildable`.
    """
    if (why := obstacle()) is not None:
        raise Unbuildable(why)
    folder = _folder(cache)
    built = folder / "libhostcuda.so"
    if not built.exists():
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build(built)
    return built


def torch_libraries() -> Path:
    """The folder of the libraries that this one needs. They are to be loaded before it, which is of any tree."""
    root = _torch()
    assert root is not None
    return root / "lib"


def _folder(cache: Path | None) -> Path:
    own = Path(__file__).parents[1] / "build"
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "terrazzo"
    for each in (users, own) if cache is None else (cache,):
        folder = each / f"hostcuda-{_key()}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            break
    return folder


def _torch() -> Path | None:
    found = importlib.util.find_spec("torch")  # without importing it
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _key() -> str:
    root = _torch()
    assert root is not None
    digest = hashlib.sha256(f"{version('torch')} {_FLAGS}".encode())
    digest.update((root / "version.py").read_bytes())  # of which commit it is
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(target: Path) -> None:
    root = _torch()
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole, linked = Path(folder, "whole.cpp"), f"{folder}/{target.name}"
        # As one source: reading torch's headers takes longer than compiling ours.
        whole.write_text("".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp"))))
        _run(["g++", *_FLAGS, *include, "-shared", str(whole), *libraries, "-o", linked])
        os.replace(linked, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unbuildable(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
