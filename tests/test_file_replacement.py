"""Files that are replaced as a whole."""

from __future__ import annotations

import stat
from pathlib import Path

from terrazzo.files import replace_file, replacing


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o600)
    replace_file(path, "new", sync=True)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_others_cannot_read_is_not_readable_while_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.touch(0o600)
    with replacing(path, sync=False) as beside:
        beside.write_text("new")
        assert stat.S_IMODE(beside.stat().st_mode) == 0o600
    assert path.read_text() == "new"


def test_a_file_that_nobody_may_write_is_replaced_and_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "fixed.json"
    path.touch(0o444)
    replace_file(path, "new", sync=False)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o444)


def test_a_link_stays_and_the_file_that_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    target, link = tmp_path / "big disk" / "metrics.jsonl", tmp_path / "metrics.jsonl"
    link.symlink_to(target)
    for text in ("first", "second"):
        replace_file(link, text, sync=False)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [*target.parent.iterdir()] == [target]


def test_a_block_that_removes_the_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    with replacing(path, sync=False) as beside:
        beside.unlink()
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]
