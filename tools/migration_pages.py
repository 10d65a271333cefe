"""Writes what the migration guides repeat from the code: diffs of scripts and configurations, dtypes, every key's fate.

python -m tools.migration_pages

A block of a page stands between `<!-- NAME ARGUMENT: python -m tools.migration_pages -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

from terrazzo.config import CONFIG_KEYS
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import Conversion, convert
from terrazzo.dialects.verbs.emit import to_text
from terrazzo.dialects.verbs.precision_table import COLUMNS, costs, precisions
from terrazzo.dialects.verbs.understand import Understood, understand
from terrazzo.documents.dotted_keys import flatten
from terrazzo.planner.model.loading import model_shape
from tools.migration.fates import Fate, fates, in_yaml, spellings

ROOT = Path(__file__).parents[1]
DATA = ROOT / "examples" / "migration"
EXAMPLES = ROOT / "examples" / "integrations"
GUIDES = ROOT / "docs" / "guides"
PAGES = tuple(GUIDES / f"migrate-from-{name}.md" for name in ("deepspeed", "fsdp", "accelerate", "trainer", "megatron"))

WORLD, MODEL = 8, "llama3-8b"
CONFIGS = {
    "deepspeed": DATA / "deepspeed.json",
    **{name: DATA / f"{name}.yaml" for name in ("fsdp1", "fsdp2", "accelerate", "trainer")},
    "megatron": DATA / "pretrain.sh",
}
SCRIPTS = {
    "deepspeed": (DATA / "before_deepspeed.py", EXAMPLES / "deepspeed_script.py"),
    "fsdp1": (DATA / "before_fsdp1.py", DATA / "after_fsdp1.py"),
    "fsdp2": (DATA / "before_fsdp2.py", EXAMPLES / "fully_shard_script.py"),
    "accelerate": (DATA / "before_accelerate.py", EXAMPLES / "accelerate_script.py"),
    "trainer": (DATA / "before_trainer.py", EXAMPLES / "trainer_script.py"),
}
"""The same program before and after, by dialect."""

GIB = 2**30
MOST_TARGETS = 5
"""More keys than these are cut off in a cell."""


def update(page: str) -> str:
    """`page` with what stands between its marks made anew."""
    for name, make in MAKERS.items():
        pattern = rf"(<!-- {name} (\w+): python -m tools\.migration_pages -->\n).*?(<!-- end of {name} -->)"
        page = re.sub(pattern, partial(_filled, make), page, flags=re.DOTALL)
    return page


def _filled(make: Callable[[str], str], match: re.Match[str]) -> str:
    return f"{match[1]}\n{make(match[2])}\n\n{match[3]}"


# -- diffs ---------------------------------------------------------------------------------------------------------


def script(name: str) -> str:
    """What changes in a training script, without its docstring."""
    before, after = (_code(path) for path in SCRIPTS[name])
    return _diff(before, after, "before.py", "after.py", 3)


def _code(path: Path) -> str:
    """A script from its first import on: what it says of itself is no part of the change."""
    text = path.read_text(encoding="utf-8")
    first = re.search(r"^(from|import) (?!__future__)", text, re.MULTILINE)
    assert first is not None, f"{path} imports nothing"
    return text[first.start() :]


def config(name: str) -> str:
    """What `terrazzo config convert` makes of a configuration."""
    path = CONFIGS[name]
    return _diff(path.read_text(encoding="utf-8"), written(name), path.name, "run.yaml", 1000)


def _diff(before: str, after: str, old: str, new: str, context: int) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), old, new, n=context, lineterm="")
    return "\n".join(["```diff", *(line.rstrip() for line in lines), "```"])


@cache
def conversion(name: str) -> Conversion:
    """Of a peer's configuration to Terrazzo's."""
    return convert(_understood(name), dialect("terrazzo"))


@cache
def _understood(name: str) -> Understood:
    shape = model_shape(MODEL)
    context = ReadingContext(world=WORLD, parameters=shape.numel, hidden_size=shape.hidden, layers=shape.layers)
    return understand(CONFIGS[name], name, context)


def written(name: str) -> str:
    """The text of the converted configuration."""
    found = conversion(name)
    return to_text(found.document, "yaml", _understood(name).loaded, found.verdicts)


# -- tables --------------------------------------------------------------------------------------------------------


def dtypes(name: str) -> str:
    """The dtype of every tensor before and after, and the memory of the model's states."""
    found, parameters = conversion(name), _understood(name).context.parameters or 0
    rows = []
    for label, description in (("before", found.before), ("after", found.after)):
        (cost,) = costs(description, (WORLD,))
        memory = "-" if cost.bytes_per_parameter is None else f"{cost.bytes_per_parameter * parameters / GIB:.1f}"
        rows.append([label, *precisions(description).cells(), memory])
    return _table(["", *COLUMNS, "GiB per rank"], rows)


def losses(name: str) -> str:
    """What of a configuration is not the same afterwards."""
    found = conversion(name)
    rows = [
        [_code_of(f"{each.key}: {in_yaml(each.value)}"), _cell(each.why)]
        for each in (*found.verdicts, *found.unsaid)
        if each.kind in ("lossy", "refused")
    ]
    return _table(["it says, or means by default", "what is lost"], rows) if rows else "Nothing is lost."


def added(name: str) -> str:
    """Terrazzo's own defaults that hold where the configuration says nothing."""
    found = conversion(name)
    values = {_terrazzos(each.key): each.value for each in found.added}
    said = flatten(found.document)
    names = [
        key
        for key, value in values.items()
        if key in CONFIG_KEYS and key not in said and value == CONFIG_KEYS[key].default
    ]
    return ", ".join(_code_of(f"{key}: {in_yaml(values[key])}") for key in names)


def _terrazzos(path: str) -> str:
    """The key of a neutral setting."""
    if path == "schedule.total_steps":
        return "train.steps"
    return path.replace("training.", "train.").replace("saving.", "checkpoint.")


def taken(name: str) -> str:
    """Keys that mean something in Terrazzo's YAML, too."""
    found = [each for each in fates(name) if each.kind in ("applied", "renamed")]
    groups = _grouped(found, lambda each: (_section(each.key), each.target, each.why))
    rows = [[_keys(group), _targets(group[0].target), _cell(_explained(group))] for group in groups]
    return _table(["key", "in Terrazzo", ""], rows)


def _explained(group: list[Fate]) -> str:
    """Why, or else what the keys do, where one line can say it."""
    if group[0].target.count(";") >= MOST_TARGETS:
        return group[0].meaning
    meanings = list(dict.fromkeys(each.meaning for each in group if each.meaning))
    return group[0].why or (meanings[0] if len(meanings) == 1 else "")


def partly(name: str) -> str:
    """Keys of which a part is lost."""
    found = [each for each in fates(name) if each.kind == "lossy"]
    groups = _by_reason(found)
    rows = [[_keys(group), _targets(group[0].target), _cell(group[0].why)] for group in groups]
    return _table(["key", "in Terrazzo", "what is lost"], rows)


def refused(name: str) -> str:
    """Keys that cannot be taken over."""
    groups = _by_reason([each for each in fates(name) if each.kind == "refused"])
    return _table(["key", "why, and what to do instead"], [[_keys(group), _cell(group[0].why)] for group in groups])


def _by_reason(found: list[Fate]) -> list[list[Fate]]:
    """Keys of one section at the top that share target and reason."""
    return _grouped(found, lambda each: ("." in each.key and each.key.partition(".")[0], each.target, each.why))


def left(name: str) -> str:
    """Keys that change no result, by section."""
    known = fates(name)
    found = [each for each in known if each.kind == "defaulted"]
    rows = []
    for group in _grouped(found, lambda each: _section(each.key) or _family(each, found)):
        section = _section(group[0].key) or _family(group[0], found)
        whole = section and len(group) == sum(_section(each.key) == section for each in known)
        names = f"all {len(group)}" if whole and len(group) > 2 else ", ".join(_code_of(_last(each)) for each in group)
        rows.append([_code_of(_section(group[0].key)) or section or "at the top", names])
    return _table(["section", "keys"], rows)


def _family(fate: Fate, found: list[Fate]) -> str:
    """What many keys at the top are about, if one is of such a family; else nothing."""
    return fate.meaning if sum(each.meaning == fate.meaning for each in found) > MOST_TARGETS else ""


def other(name: str) -> str:
    """Other spellings of keys."""
    return _table(["key", "read as"], [[_code_of(old), _code_of(new)] for old, new in spellings(name).items()])


MAKERS: dict[str, Callable[[str], str]] = {
    "script": script,
    "config": config,
    "dtypes": dtypes,
    "losses": losses,
    "added": added,
    "taken": taken,
    "partly": partly,
    "refused": refused,
    "left": left,
    "other": other,
}
"""What makes a block, by its name."""


# -- cells ---------------------------------------------------------------------------------------------------------


def _grouped(found: Iterable[Fate], key: Callable[[Fate], object]) -> list[list[Fate]]:
    groups: dict[object, list[Fate]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def _section(key: str) -> str:
    return key.removesuffix(".*").rpartition(".")[0]


def _keys(group: list[Fate]) -> str:
    """The first key in full with its example, the others of its section by their names."""
    texts, section = [], None
    for each in group:
        name = _last(each) if _section(each.key) == section else each.key
        texts.append(name if each.value is None else f"{name}: {in_yaml(each.value)}")
        section = _section(each.key)
    return ", ".join(map(_code_of, texts))


def _last(fate: Fate) -> str:
    return fate.key.removeprefix(f"{_section(fate.key)}.")


def _targets(text: str) -> str:
    if not text:
        return ""
    found = text.split("; ")
    more = " and so on" if len(found) > MOST_TARGETS else ""
    return ", ".join(map(_code_of, found[:MOST_TARGETS])) + more


def _code_of(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
