"""The machine and the libraries that a record is made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of each package, or that it is not installed."""
    return {"Python": platform.python_version(), **{package: _version(package) for package in packages}}


def processor() -> str:
    """Its name and how many cores this machine sees."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores visible)" if names else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
