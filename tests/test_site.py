"""The site has every page and every public name, and docstrings are laid out so that it can show them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.site.names import AREAS, Name, public_names

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SITE = ROOT / "mkdocs.yml"


class Settings(yaml.SafeLoader):
    """mkdocs.yml, but for the objects that it builds."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def in_nav(entries: Any) -> Iterator[str]:
    for entry in [entries] if isinstance(entries, str) else entries:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from in_nav(below)


def said() -> list[Name]:
    packages = [package for area in AREAS.values() for package in area.packages]
    names = [name for package in packages for name in public_names(package)]
    return list({each.path: each for name in names for each in (name, *name.members())}.values())


def test_every_page_is_once_in_the_nav_and_nothing_else_is() -> None:
    listed = list(in_nav(yaml.load(SITE.read_text(encoding="utf-8"), Settings)["nav"]))  # noqa: S506  a safe loader
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    areas = [f"reference/api/{area}.md" for area in AREAS]
    outside = [entry for entry in listed if entry.startswith("source/")]
    assert all((ROOT / entry.removeprefix("source/")).exists() for entry in outside)
    assert sorted(listed) == sorted([*pages, *areas, *outside])


def test_every_public_package_is_in_an_area() -> None:
    """Those that guides import from, and all integrations."""
    named = {package for area in AREAS.values() for package in area.packages}
    guides = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/guides").glob("*.md"))
    imported = set(re.findall(r"^\+?(?:from|import) (terrazzo[\w.]*)", guides, re.MULTILINE))
    assert {name for name in imported if not any(f"{name}.".startswith(f"{one}.") for one in named)} == set()
    integrations = {path.parent for path in (SOURCE / "terrazzo/integrations").glob("*/__init__.py")}
    integrations -= {SOURCE / "terrazzo/integrations/shared"}  # what integrations share is none
    assert {".".join(path.relative_to(SOURCE).parts) for path in integrations} <= named


def test_docstrings_are_there_and_their_sections_stand_alone() -> None:
    """The parser of the site takes `Raises: this` for text, as it does a section whose entries are not indented."""
    for name in said():
        assert name.summary, f"{name.path} has no docstring"
        inline = re.search(r"\b(Args|Attributes|Raises|Returns|Yields): *\S", name.docstring)
        assert inline is None, f"{name.path}: a line of its own for {inline and inline[1]}"
        for entries in re.findall(r"^(?:Args|Attributes|Raises):\n((?: .*\n?)*)", name.docstring, re.MULTILINE):
            lines = entries.splitlines()
            assert lines and all(re.match(r" {4}[\w, *]+: | {8}", line) for line in lines), name.path
