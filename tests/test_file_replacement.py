"""Files that are replaced as a whole."""

from __future__ import annotations

import stat
from pathlib import Path

from terrazzo.files import replace_file


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o600)
    replace_file(path, "new", sync=True)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [path]
