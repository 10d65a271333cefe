"""Writes the tables of the documentation: names in Python, keys of the configuration, options of commands, exit codes,
modules of the engine.

python -m tools.reference_pages

A table stands between `<!-- KIND WHAT: python -m tools.reference_pages -->` and `<!-- end of KIND -->`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic.fields import FieldInfo

from terrazzo import cli
from terrazzo.config import Config, Section
from terrazzo.exit_codes import EXIT_CODES
from tools.site.names import AREAS, Name, public_names, signature
from tools.user_acts import ACTS, Answer, Moment, Plans

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
CONCEPTS = REFERENCE.parent / "concepts"
ENGINE = Path(__file__).parents[1] / "src" / "terrazzo" / "engine"
PAGES = (
    *(REFERENCE / name for name in ("api.md", "train-config.md", "cli.md", "exit-codes.md")),
    CONCEPTS / "user-acts.md",
    CONCEPTS / "engine.md",
)
MARK = "python -m tools.reference_pages"

WITHOUT_MEMBERS = "terrazzo.integrations."
"""What these classes have is for the most part what the other library's have."""


def update(page: str) -> str:
    """`page` with each of its tables made anew."""

    def table(match: re.Match[str]) -> str:
        kind, what = match[1], match[2]
        return f"<!-- {kind} {what}: {MARK} -->\n\n{MAKERS[kind](what)}\n\n<!-- end of {kind} -->"

    return re.sub(rf"<!-- (\w+) ([^>]+): {MARK} -->.*?<!-- end of \1 -->", table, page, flags=re.DOTALL)


def names(package: str) -> str:
    """The public names of a package, each with the first paragraph of its docstring; a class's methods below it."""
    area = next(area for area in AREAS.values() if package in area.packages)
    rows = [["name", ""]]
    for name in public_names(package):
        if package == "terrazzo.engine" and name.path in {each.path for each in public_names("terrazzo")}:
            continue
        rows.append(_row(name, area.prefix))
        if not name.path.startswith(WITHOUT_MEMBERS):
            rows += [_row(member, "") for member in name.members()]
    return _table(rows)


def keys(section: str) -> str:
    """The keys of a section of the configuration: default and meaning, as the schema has them."""
    rows = [["key", "default", "meaning"]]
    for key, field in settings():
        if key.partition(".")[0] == section:
            rows.append([f"`{key}`", f"`{_default(field)}`", _meaning(field)])
    return _table(rows)


def options(what: str) -> str:
    """What a command takes, as its `--help` says; `COMMAND, PANEL` for the options of one panel of it."""
    verb, _, panel = what.partition(", ")
    rows = [[panel.lower(), ""]]
    for parameter in _command(verb).params:
        if (getattr(parameter, "rich_help_panel", None) or "") == panel:
            argument = parameter.param_type_name == "argument"
            spelled = [parameter.metavar] if argument else [*parameter.opts, *parameter.secondary_opts]
            takes = "" if argument or parameter.metavar is None else f" {parameter.metavar}"
            rows.append([", ".join(f"`{one}`" for one in spelled) + takes, _in_code(_uncapitalised(parameter.help))])
    return _table(rows)


def acts(_: str) -> str:
    """What a user may do with a sharded model: a row for each act, a line for moments that are answered alike."""
    rows = [["", *Plans, ""]]
    for act in ACTS.values():
        note = act.note
        if act.updating is Answer.REFUSED:
            note = f"While `@cpu` or `@nvme` updates: {act.updating.text} between step and the next forward. {note}"
        rows.append([f"`{act.code}`", *(_by_moment(act.answers(plans)) for plans in Plans), note.strip()])
    return _table(rows)


def _by_moment(answers: Mapping[Moment, Answer]) -> str:
    """What comes of it most often, and the moments at which it is something else."""
    usual = max(answers.values(), key=list(answers.values()).count)
    others: dict[Answer, list[str]] = {}
    for moment, answer in answers.items():
        if answer is not usual:
            others.setdefault(answer, []).append(moment)
    return "; ".join([usual.text, *(f"{', '.join(moments)}: {each.text}" for each, moments in others.items())])


def codes(_: str) -> str:
    """How a run may end: the table of exit codes."""
    rows = [["code", "`reason`", "meaning", "what to do"]]
    rows += [[str(code), f"`{row.reason}`", row.meaning, row.edit] for code, row in EXIT_CODES.items()]
    return _table(rows)


def modules(folder: str) -> str:
    """The folders of the engine; or the modules of one, those of folders in it at their place."""
    deep = folder != ENGINE.name
    inside = _modules(ENGINE / folder if deep else ENGINE, deep)
    return _table([["where", "what is there"], *([f"`{path}`", said] for path, said in inside)])


def _modules(folder: Path, deep: bool) -> Iterator[tuple[str, str]]:
    """Modules and folders in a package, with what its docstring says of each: rows of one paragraph, `name  text`."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    inside = {path.stem for path in folder.iterdir()}
    paragraphs = (re.findall(r"^ *(\w+) +(.*)$", paragraph, re.M) for paragraph in docstring.split("\n\n"))
    for name, said in next(rows for rows in paragraphs if rows and {name for name, _ in rows} <= inside):
        is_folder = (folder / name).is_dir()
        yield f"{name}/" if is_folder else name, said
        if is_folder and deep:
            yield from ((f"{name}/{path}", each) for path, each in _modules(folder / name, deep))


MAKERS = {"modules": modules, "names": names, "keys": keys, "options": options, "acts": acts, "codes": codes}


def settings(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the configuration with what the models say of it."""
    for name, field in section.model_fields.items():
        kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if isinstance(kind, type)]
        inner = next((kind for kind in kinds if issubclass(kind, Section)), None)
        if inner is not None:
            yield from settings(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _row(named: Name, prefix: str) -> list[str]:
    return [f"`{prefix}{signature(named)}`", named.summary]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return json.dumps(str(value) if isinstance(value, Path) else value)


def _meaning(field: FieldInfo) -> str:
    """The description, and the choices that it does not name."""
    said = field.description or ""
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    if not choices or all(f"`{choice}`" in said for choice in choices):
        return said
    listed = [f"`{choice}`" for choice in choices]
    return f"{', '.join(listed[:-1])} or {listed[-1]}{'; ' if said else ''}{said}"


def _command(verb: str) -> Any:
    command: Any = typer.main.get_command(cli.app)
    for word in verb.split()[1:]:
        command = command.commands[word]
    return command


def _uncapitalised(text: str) -> str:
    """A sentence as the rows have it; a name that begins in capitals keeps them."""
    plain = text[1:2].islower() or text[1:2] == " "
    return (text[0].lower() + text[1:] if plain else text).removesuffix(".")


def _in_code(text: str) -> str:
    """Options and commands that a help text names, set as code."""
    return re.sub(r"(?<![`\w-])--[a-z][\w-]*", r"`\g<0>`", text)


def _table(rows: list[list[str]]) -> str:
    head, *others = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [re.sub(" +", " ", f"| {' | '.join(line)} |") for line in (head, *others)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
