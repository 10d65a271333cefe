"""Checkpoints of earlier versions of the format, as they were written then: read for ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from terrazzo import checkpoint
from terrazzo.checkpoint import open_source
from terrazzo.checkpoint.operations import audit
from terrazzo.checkpoint.operations.convert import convert
from terrazzo.engine import ModelState
from tests.checkpoint.documented import read_as_documented
from tests.checkpoint.subject import Witness, build, save
from tests.helpers.threads import run_in_threads

VERSION_2 = Path(__file__).parent / "version_2" / "step-00000002"
"""Step 2 of `subject`, saved by two ranks under zero3 by the last release that wrote version 2."""


def test_a_checkpoint_of_version_2_is_loaded_to_the_bit() -> None:
    assert json.loads((VERSION_2 / "manifest.json").read_text())["version"] == 2
    run_in_threads(2, lambda rank: Witness(VERSION_2.parent, range(2, 3)).loads(2))


def test_one_of_version_2_is_loaded_by_other_ranks() -> None:
    saved = read_as_documented(VERSION_2)

    def body(rank: int) -> set[tuple[str, str]]:
        model, optimizer = build(5, plan="zero1")
        checkpoint.load(VERSION_2, model, optimizer)
        pieces = list(ModelState(model).pieces())
        for piece in pieces:
            assert piece.tensor.numpy().tobytes() == saved[piece.name, piece.kind][piece.start : piece.stop].tobytes()
        return {(piece.name, piece.kind) for piece in pieces}

    buffers = {name for name in saved if name[1] == "buffer"}
    assert set().union(*run_in_threads(3, body)) == saved.keys() - buffers


def test_one_of_version_2_becomes_one_of_today(tmp_path: Path) -> None:
    source = open_source(VERSION_2)
    assert source.about()["version"] == 2
    assert audit.open_audit(str(VERSION_2)).problems(1, lambda count: None) == []
    convert(source, str(tmp_path / "a"))
    assert open_source(tmp_path / "a").about()["version"] == 3
    before, after = read_as_documented(VERSION_2), read_as_documented(tmp_path / "a")
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)


def test_files_are_written_as_in_version_2(tmp_path: Path) -> None:
    """Only the manifest is another."""
    run_in_threads(2, lambda rank: save(tmp_path, 2))
    written = tmp_path / VERSION_2.name
    for file in sorted(VERSION_2.glob("*.safetensors")):
        assert (written / file.name).read_bytes() == file.read_bytes()
    shutil.rmtree(written)
