"""What mkdocs does beside rendering docs/: the reference of Python names, and files outside docs/ that pages link to.

Such a file becomes a page below source/: Markdown as it is, other text as one block of code. Pictures are copied.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site.names import AREAS, Area, public_names, signature

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
PICTURES = (".svg", ".png")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    listed: set[str] = set()
    for name, area in AREAS.items():
        files.append(File.generated(config, f"reference/api/{name}.md", content=_reference(area, listed)))
    for path in sorted(_outside()):
        files.append(_carried(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Links to where files are on the site, and fences with the language alone: the rest is for the tests."""
    at = page.file.src_uri
    origin = ROOT / at.removeprefix("source/").removesuffix(".md") if at.startswith("source/") else DOCS / at
    if at.startswith("source/") and not origin.exists():
        origin = origin.with_name(origin.name + ".md")
    if at == "reference/api.md":
        markdown = _linked(markdown)
    if origin.suffix == ".md":
        folder = PurePosixPath(at).parent
        markdown = LINK.sub(lambda link: _on_site(link[1], origin.parent, folder) + (link[2] or ""), markdown)
    return re.sub(r"^```(\w+) [\w-]+$", r"```\1", markdown, flags=re.MULTILINE)


def _outside() -> set[Path]:
    """Files outside docs/ that pages of the site lead to."""
    found = {ROOT / "CONTRIBUTING.md"}
    pages = sorted({*DOCS.rglob("*.md"), *found})
    for page in pages:
        for target in _targets(page) - found:
            if not target.is_relative_to(DOCS):
                found.add(target)
                if target.suffix == ".md":
                    pages.append(target)
    return found


def _targets(page: Path) -> set[Path]:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return {target for path, _ in links if (target := (page.parent / path).resolve()).is_file()}


def _site_path(target: Path) -> str:
    """Where on the site, as a source path of mkdocs, a file of the repository is."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    return f"source/{path}" if target.suffix in (".md", *PICTURES) else f"source/{path}.md"


def _on_site(link: str, origin: Path, folder: PurePosixPath) -> str:
    target = (origin / link).resolve()
    return os.path.relpath(_site_path(target), folder) if target.is_file() else link


def _carried(path: Path, config: MkDocsConfig) -> File:
    at = _site_path(path)
    if path.suffix in PICTURES:
        return File.generated(config, at, abs_src_path=str(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        language = {".py": "python", ".yaml": "yaml", ".json": "json"}.get(path.suffix, "text")
        text = f"{UNSEARCHED}# {path.relative_to(ROOT)}\n\n````{language}\n{text}\n````\n"
    return File.generated(config, at, content=text)


def _reference(area: Area, listed: set[str]) -> str:
    """One entry for each public name that is not `listed` in another area, from its docstring."""
    guide = os.path.relpath(area.guide, "reference/api")
    lines = [f"# {area.title}", "", f"In use: [the guide]({guide}). In a line each: [all names](../api.md).", ""]
    level = 3 if len(area.packages) > 1 else 2
    for package in area.packages:
        lines += [f"## {package}", ""] if level == 3 else []
        lines += [f"`{_import(package, area)}`", ""]
        for name in public_names(package):
            if name.path in listed:
                continue
            listed.add(name.path)
            options = f"heading: {area.prefix}{name.name}, toc_label: {name.name}, heading_level: {level}"
            members = ", members: false" if name.path == package + "." + name.name else ""
            lines += [f"::: {name.path}", f"    options: {{{options}{members}}}", ""]
    return "\n".join(lines)


def _import(package: str, area: Area) -> str:
    return "import terrazzo as tz" if area.prefix else f"from {package} import ..."


def _linked(markdown: str) -> str:
    """The rows of names, each leading to its entry, which has the arguments."""
    entries: dict[str, str] = {}
    for area in AREAS.values():
        for package in area.packages:
            for name in public_names(package):
                entries.setdefault(area.prefix + signature(name), name.path)
                entries.update((signature(member), member.path) for member in name.members())

    def linked(row: re.Match[str]) -> str:
        path = entries.get(row[1].replace("\\|", "|"))
        return f"| [`{row[1].partition('(')[0]}`][{path}] |" if path else row[0]

    return re.sub(r"^\| `([^`]+)` \|", linked, markdown, flags=re.MULTILINE)
