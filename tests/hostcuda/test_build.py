"""The device's library: built once, or refused with a reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hostcuda
from hostcuda import build
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "g++" in str(hostcuda.obstacle())
    with pytest.raises(hostcuda.Unbuildable, match=r"g\+\+"):
        build.library(tmp_path)


def test_after_torch_it_is_too_late() -> None:
    with pytest.raises(RuntimeError, match="too late"):
        hostcuda.load()


def left_as_they_are() -> list[str]:
    """Names of torch.cuda that are neither simulated nor refused."""
    import torch

    from hostcuda import surface

    known = surface._functions().keys() | surface._AS_IN_TORCH
    found = []
    for name in torch.cuda.__all__:
        if name in known or name.endswith(("Storage", "Tensor")):
            continue
        try:
            getattr(torch.cuda, name)()
        except NotImplementedError as error:
            found += [] if f"torch.cuda.{name}" in str(error) else [name]
        else:
            found.append(name)
    return found


def test_what_torch_cuda_has_is_simulated_or_refused(one_rank: Ranks) -> None:
    assert one_rank.run(left_as_they_are) == [[]]


@pytest.mark.long
def test_processes_that_build_at_once_build_it_once(tmp_path: Path) -> None:
    command = f"from pathlib import Path; from hostcuda import build; print(build.library(Path({str(tmp_path)!r})))"
    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(subprocess.run, [sys.executable, "-c", command], capture_output=True, text=True, check=True)
            for _ in range(3)
        ]
    (path,) = {run.result().stdout.strip() for run in runs}
    assert [file.name for file in Path(path).parent.iterdir() if file.is_dir()] == []


def test_another_tree_finds_what_is_built_of_the_same_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    here = build._folder(None)
    sources = tmp_path / "tree" / "hostcuda" / "native"
    shutil.copytree(build._SOURCES, sources)
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setattr(build, "__file__", str(sources.parent / "build.py"))
    assert build._folder(None) == here and here.is_relative_to(tmp_path / "users")
    (sources / "order.cpp").write_text("// otherwise")
    assert build._folder(None) != here, "of other sources"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build._folder(None).parent == tmp_path / "tree" / "build", "where the user's cannot be written"
