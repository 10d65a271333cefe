"""Python imports this at its start when `terrazzo profile` has put it on the path. It imports the one it hides, too."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

__all__: list[str] = []

_HERE = Path(__file__).resolve().parent


class _TorchFinder:
    """Has the probe begin once torch has been imported, which the other finders find."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                _begin()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    probe = _load("probe").ScriptProbe(Path(os.environ["TERRAZZO_PROFILE"]))
    _load("wraps").begin(probe)


def _load(name: str) -> Any:
    """Load a module by its file, without the package around it, which imports more than the script asked for."""
    spec = importlib.util.spec_from_file_location(f"_terrazzo_{name}", _HERE.parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _import_hidden() -> None:
    hidden = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != _HERE]
    try:
        __import__("sitecustomize")
    except ImportError:
        if hidden is not None:
            sys.modules["sitecustomize"] = hidden


_import_hidden()
if "TERRAZZO_PROFILE" in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
