"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "package", ["terrazzo", *(f"terrazzo.{name}" for name in ("checkpoint", "config", "documents", "telemetry"))]
)
def test_what_a_package_lists_can_be_had_and_is_imported_for_type_checkers(package: str) -> None:
    """A name that is stated without an import would be `Any` to them, and an editor would show no signature."""
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    statements = ast.parse(Path(str(module.__file__)).read_text()).body
    stated = next(node for node in statements if isinstance(node, ast.If))
    imports = [node for node in [*statements, *stated.body] if isinstance(node, ast.ImportFrom)]
    imported = {alias.name: node.module for node in imports for alias in node.names}
    assert set(module.__all__) - set(imported) <= {"__version__"}
    for name in set(module.__all__) & set(imported):
        home = importlib.import_module(str(imported[name]))
        assert getattr(home, name) is getattr(module, name), name


def test_a_name_is_imported_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package/heavy.py").write_text("weight = 7\n")
    (tmp_path / "lazy_package/__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from terrazzo.lazy import lazily\n"
        "if TYPE_CHECKING:\n    from lazy_package.heavy import weight\n"
        "else:\n    __getattr__, __dir__ = lazily(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lazy_package")
    assert {"weight", "lazily"} <= set(dir(module))
    assert "lazy_package.heavy" not in sys.modules
    assert module.weight == 7
    assert "lazy_package.heavy" in sys.modules
    with pytest.raises(AttributeError, match="'lazy_package' has no attribute 'volume'"):
        _ = module.volume
