"""Checkpoints under the names that other libraries give: saved over an older one, opened on all ranks, resumed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from terrazzo.checkpoint import Source, open_source
from terrazzo.checkpoint.loading.load import own_folder, own_groups, restore, warn_of_notes
from terrazzo.checkpoint.saving.save import save_as_first
from terrazzo.errors import BadInput
from terrazzo.exchange import on_first, together
from terrazzo.files import sync_folder

__all__ = ["opened", "resume", "save_over", "settle"]


def save_over(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Callable[[], dict[str, Any]],
    *,
    files: bool = False,
) -> None:
    """`checkpoint.save`, in place of what lies under that name, which stays until the new one is complete. Collective.

    Between the two renames at the end nothing has the name: the old one is `.NAME.replaced-NONCE` and the new one
    `NAME.new-NONCE`. After a kill just there, `settle` goes on. After an earlier kill the next save removes the new
    one: that it is ours says the file `.NAME.saving-NONCE`.

    Args:
        extra: makes what is saved beside weights and states: on the first rank alone, as the other libraries do it.
            Must not talk to other ranks; what it raises is raised on all.
        files: whether another library's checkpoint, a single file, may be replaced too.

    Raises:
        BadInput: what has the name is no checkpoint of Terrazzo's.
    """
    path = _named(path)
    on_first(lambda: _check_replaceable(path, files), BadInput)
    nonce = on_first(lambda: _begin(path))
    if nonce is None:
        save_as_first(path, model, optimizer, extra)
        return
    try:
        save_as_first(_fresh(path, nonce), model, optimizer, extra)
    except BaseException:  # of a save that fails nothing is left but this
        _remove(_hidden(path, "saving", nonce))
        raise
    on_first(lambda: _take_place(path, nonce))


def _check_replaceable(path: str, files: bool) -> None:
    if os.path.lexists(path) and own_folder(path) is None and (os.path.isdir(path) or not files):
        raise BadInput(
            f"'{path}' is there and is not a checkpoint of Terrazzo's, so it is not replaced: save under another name."
        )


def settle(path: str | os.PathLike[str]) -> bool:
    """Finish what a kill has left of `save_over`, before reading. Collective.

    Returns:
        Whether there is anything under the name, as rank 0 sees it.

    Raises: `BadInput` where that cannot be done.
    """
    return on_first(lambda: _settle(_named(path)), BadInput)


def opened(path: str | os.PathLike[str], model: nn.Module | None = None) -> Source:
    """`checkpoint.open_source`, once no rank has failed at it. Collective."""
    groups = [] if model is None else own_groups(model)
    return together(lambda: open_source(path, model, groups), BadInput)


def resume(source: Source, model: nn.Module, optimizer: Optimizer | None, *, files: bool = True) -> None:
    """`checkpoint.load` of one that is `opened`. Collective.

    Args:
        optimizer: None takes the weights alone.
        files: whether to warn of the checkpoint's further files; False where the library reads them itself.
    """
    restore(source, model, optimizer)
    of_optimizer = source.optimizer_notes if optimizer is not None else []
    of_files = source.file_notes if files else []
    warn_of_notes(source, [*source.notes, *of_optimizer, *of_files])


def _named(path: str | os.PathLike[str]) -> str:
    """The path without slashes at the end, behind which it would have no name."""
    return os.fspath(path).rstrip("/")


def _fresh(path: str, nonce: str) -> str:
    """Where the new one is until it gets the name. Hidden names are those of incomplete checkpoints."""
    return f"{path}.new-{nonce}"


def _hidden(path: str, role: Literal["saving", "replaced"], nonce: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.{role}-{nonce}")


def _nonces(path: str, role: Literal["saving", "replaced"]) -> list[str]:
    """The nonces of all folders of that role beside `path`."""
    folder, name = os.path.split(os.path.abspath(path))
    own = re.compile(rf"\.{re.escape(name)}\.{role}-([0-9a-f]{{8}})")
    return [match[1] for match in map(own.fullmatch, _listed(folder)) if match]


def _take_place(path: str, nonce: str) -> None:
    os.rename(path, _hidden(path, "replaced", nonce))
    _finish(path, nonce)
    _remove(_hidden(path, "saving", nonce))


def _begin(path: str) -> str | None:
    """Finish or remove what kills have left, and note that a save begins: its nonce, or None where nothing is replaced.

    A fixed name might be a user's own, which would be removed.
    """
    is_there = _settle(path)
    for nonce in _nonces(path, "saving"):
        _remove(_fresh(path, nonce))
        _remove(_hidden(path, "saving", nonce))
    if not is_there:
        return None
    nonce = os.urandom(4).hex()
    Path(_hidden(path, "saving", nonce)).touch()
    return nonce


def _settle(path: str) -> bool:
    for nonce in _nonces(path, "replaced"):
        _finish(path, nonce)
    return os.path.lexists(path)


def _finish(path: str, nonce: str) -> None:
    """Put the new one in place of the old one, and remove that. Another process may be at it: a reader, a saver."""
    fresh, old = _fresh(path, nonce), _hidden(path, "replaced", nonce)
    if not os.path.lexists(path) and os.path.lexists(fresh):
        with contextlib.suppress(FileNotFoundError):
            os.rename(fresh, path)
        sync_folder(Path(os.path.dirname(old)))
    if os.path.lexists(path):  # else somebody has removed the new one since: the old one is not ours to bring back
        _remove(old)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # who may not look may still read what is there
        return []


def _remove(path: str) -> None:
    """What stays is removed by the next one."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)
