"""Builds the native library with a plain g++ against the torch that is installed: once per tree, in `build/`."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

__all__ = ["Unbuildable", "library", "obstacle"]

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-Wall", "-D_GLIBCXX_USE_CXX11_ABI=1")


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
        cache: the folder that the build's folder is in; `build/` beside this package if not given.

    Raises: `Unbuildable`.
    """
    if (why := obstacle()) is not None:
        raise Unbuildable(why)
    cache = cache or Path(__file__).parents[1] / "build"
    folder = cache / f"hostcuda-{_key()}"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "libhostcuda.so"
    if not built.exists():
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build(built)
    return built


def _torch() -> Path | None:
    found = importlib.util.find_spec("torch")  # without importing it
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _key() -> str:
    digest = hashlib.sha256(f"{version('torch')} {_torch()} {_FLAGS}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(target: Path) -> None:
    root = _torch()
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
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
