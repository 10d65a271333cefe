"""Globs over names in a model, such as `layers.*.norm`: which names one means.

A `*` has one meaning for each of two questions, of which every option that takes globs asks one:

    which modules are it  units, styles of tensor parallelism, a pipeline's line: a `*` stands for one level of names,
                          so that `layers.*` are the layers, and not what is inside of them
    which names match     layers that `float8` skips, parameters that are frozen, not decayed, or for Muon: a `*` stands
                          for any part of a name, so that `*.bias` are the biases of all modules
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

__all__ = ["level_hint", "matches_any", "matches_one", "of_one_level"]


def of_one_level(names: Iterable[str], glob: str) -> list[str]:
    """The names that a glob means, a `*` for one level."""
    dots = glob.count(".")
    return [name for name in names if name.count(".") == dots and fnmatchcase(name, glob)]


def level_hint(names: Iterable[str], glob: str) -> str:
    """For an error, where a glob means none of one level: a glob that does, if its `*` was taken for several levels."""
    deeper = next((name for name in names if fnmatchcase(name, glob)), None)
    if deeper is None:
        return ""
    return f" A '*' stands for one level of names here: give '{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', deeper)}'."


def matches_any(name: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs matches a name, a `*` for any part of it."""
    return any(fnmatchcase(name, glob) for glob in globs)


def matches_one(names: Iterable[str], glob: str) -> bool:
    """Whether a glob matches one of the names, a `*` for any part of it."""
    return any(fnmatchcase(name, glob) for name in names)
