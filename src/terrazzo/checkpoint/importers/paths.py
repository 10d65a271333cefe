"""Files that a checkpoint names: only those in its own folder are opened."""

from __future__ import annotations

import stat
from pathlib import Path

from terrazzo.errors import BadInput, Damaged

__all__ = ["size_of_plain_file", "subfolder"]


def size_of_plain_file(folder: Path, name: str) -> int:
    """The bytes of the file `name` of `folder`.

    A link may lead to another file of the same checkpoint. The cache of the Hugging Face Hub keeps the files of a
    folder `snapshots/<revision>` in `blobs`, two folders up.

    Raises:
        Damaged: there is no such file.
        BadInput: it is not a plain file, or not inside.
    """
    if Path(name).name != name or name == "..":
        raise BadInput(f"'{folder}' refers to a file '{name}', which is not inside: it is damaged, or a trap.")
    try:
        target = (folder / name).resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError, ValueError) as error:
        raise Damaged(f"'{folder}' has no file '{name}' that can be read: {error}.") from None
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":
        inside.append(folder.resolve().parent.parent / "blobs")
    if target.parent not in inside:
        raise BadInput(
            f"'{folder / name}' is a link to '{target}', outside of the checkpoint, and is not followed: copy the"
            " folder with cp -rL first."
        )
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"'{folder / name}' is not a plain file.")
    return status.st_size


def subfolder(folder: Path, name: str) -> Path | None:
    """The folder `name` in `folder`; None where there is none, `BadInput` where it is a link."""
    path = folder / name
    if path.is_symlink():
        raise BadInput(f"'{path}' is a link and is not followed: copy the folder with cp -rL first.")
    return path if path.is_dir() else None
