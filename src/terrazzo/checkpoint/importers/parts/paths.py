"""Files that a checkpoint names: only those in its own folder are opened."""

from __future__ import annotations

from pathlib import Path

from terrazzo.errors import BadInput, Damaged
from terrazzo.untrusted_files import size_inside

__all__ = ["size_of_plain_file", "subfolder"]


def size_of_plain_file(folder: Path, name: str) -> int:
    """The bytes of the file `name` of `folder`, which may be a link within a checkpoint: see `size_inside`.

    Raises:
        Damaged: there is no such file.
        BadInput: it is not a plain file, or not inside.
    """
    if Path(name).name != name or name == "..":
        raise BadInput(f"'{folder}' refers to a file '{name}', which is not inside: it is damaged, or a trap.")
    try:
        return size_inside(folder / name, folder)
    except OSError as error:
        raise Damaged(f"'{folder}' has no file '{name}' that can be read: {error}.") from None


def subfolder(folder: Path, name: str) -> Path | None:
    """The folder `name` in `folder`; None where there is none, `BadInput` where it is a link."""
    path = folder / name
    if path.is_symlink():
        raise BadInput(f"'{path}' is a link and is not followed: copy the folder with cp -rL first.")
    return path if path.is_dir() else None
