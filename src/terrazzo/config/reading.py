"""Reading a configuration: a file, then `section.key=value` overrides, then validation in plain words.

All problems of a file are reported together, each with the key, what was found and what was expected.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from terrazzo.config.keys import CONFIG_KEYS, SHORTHANDS
from terrazzo.config.schema import Config
from terrazzo.config.secrets import without_passwords
from terrazzo.config.section import KEYS_ALONE, is_name
from terrazzo.config.sections.launch import is_rank_range
from terrazzo.config.wording import placed, sentences, wrong_keys, wrong_value
from terrazzo.documents import comments, parse_value, read_text
from terrazzo.documents.dotted_keys import split
from terrazzo.errors import BadInput

__all__ = [
    "CheckedKeys",
    "apply_override",
    "check_keys",
    "config_from_dict",
    "config_problems",
    "load_config",
    "setting_texts",
]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML, JSON or TOML file with overrides applied.

    Raises:
        BadInput: the file is missing or malformed, or any value in it is unknown, of the wrong type or out of
            range. Passwords in URLs are not repeated.
    """
    try:
        raw = _read(Path(path))
        for override in overrides:
            apply_override(raw, override)
    except BadInput as error:
        raise BadInput(without_passwords(str(error))) from None
    return config_from_dict(raw, origin=" ".join([str(path), *(["with", *overrides] if overrides else [])]))


def config_from_dict(raw: dict[str, Any], origin: str = "config") -> Config:
    """A validated configuration from nested dicts; raises `BadInput` listing every problem at once."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [words for _, words in _problems(raw, error)]
    listed = "\n".join(f"  - {line}" for line in lines)
    text = f"{origin}: {lines[0]}" if len(lines) == 1 else f"{origin} has {len(lines)} problems:\n{listed}"
    raise BadInput(without_passwords(text))


def config_problems(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `config_from_dict` would list: each problem in plain words, behind the dotted key to change, or the section
    whose keys do not agree; the empty one is the whole.
    """
    try:
        Config.model_validate(raw)
    except ValidationError as error:
        return [(key, without_passwords(words)) for key, words in _problems(raw, error)]
    return []


def _problems(raw: Mapping[str, Any], invalid: ValidationError) -> list[tuple[str, str]]:
    """Keys that are wrong by themselves, and sections whose keys do not agree; or where each key is right, all that
    cannot be together, within sections and between them: what several sections say is not known before.
    """
    try:
        config = Config.model_validate(raw, context=KEYS_ALONE)
    except ValidationError:
        return sentences(invalid)
    return [placed(section, told) for section, told in config.disagreements()]


@dataclass(frozen=True)
class CheckedKeys:
    """Each key of a document by itself, whatever is wrong with others.

    Attributes:
        values: of the whole schema by dotted key, as validated; the default where the document has none or a wrong one.
        problems: what is wrong, in plain words, by dotted key, or by the section that is no section. Keys that the
            schema does not have are left out.
    """

    values: Mapping[str, Any]
    problems: Mapping[str, str]


def check_keys(raw: Mapping[str, Any]) -> CheckedKeys:
    """What `config_from_dict` would say of each key. Keys that are right by themselves may still not agree."""
    problems: dict[str, str] = {}
    while True:
        try:
            config = Config.model_validate(raw, context=KEYS_ALONE)
        except ValidationError as error:
            for place, errors in wrong_keys(error).items():
                if errors[0]["type"] != "extra_forbidden":
                    words = " ".join(wrong_value(place, errors, "it"))
                    problems[".".join(map(str, place))] = without_passwords(words)
                raw = _without(raw, place)
        else:
            return CheckedKeys({key: operator.attrgetter(key)(config) for key in CONFIG_KEYS}, problems)


def _without(raw: Mapping[Any, Any], names: Sequence[int | str]) -> dict[Any, Any]:
    """A copy of `raw` without the key at the path `names`, or without what stands in place of its section."""
    name, *below = names
    inner = raw.get(name)
    if not below or not isinstance(inner, Mapping):
        return {key: value for key, value in raw.items() if key != name}
    return {**raw, name: _without(inner, below)}


def setting_texts(config: BaseModel | dict[str, Any]) -> dict[str, str]:
    """Every setting as `section.key` → JSON text: the form in which settings are compared."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = json.dumps(value)

    walk("", config.model_dump(mode="json") if isinstance(config, BaseModel) else config)
    return flat


def _read(path: Path) -> dict[str, Any]:
    text, kind = read_text(path)
    if kind == "arguments":
        raise BadInput(
            f"'{path}' is a script by its name, and a configuration is a file in YAML, JSON or TOML. If it starts"
            f" Megatron-LM, `terrazzo config convert {path} --to terrazzo` writes one."
        )
    raw = parse_value(text, kind, str(path), is_rank_range)
    if raw is None or raw == {}:
        raise BadInput(
            f"'{path}' is empty, so there is nothing to train: write sections such as 'model:', 'data:' and 'train:',"
            " or have `terrazzo init` write a file. A run of defaults alone is one line: 'train: {steps: 1000}'."
        )
    if not isinstance(raw, dict):
        raise BadInput(f"'{path}' holds a {type(raw).__name__}, expected sections such as 'model:' and 'train:'.")
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set `section.key=value` in place; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip("."):
        raise BadInput(f"Override '{override}' has no value: write section.key=value, such as train.steps=100.")
    try:
        value = text.strip() if is_rank_range(key, text.strip()) else parse_value(text, "yaml", key, is_rank_range)
        has_comment = any(comments(text))
    except BadInput as error:
        why = str(error).rstrip(".")
        raise BadInput(f"The value of override '{override}' is not valid YAML: quote it ({why}).") from None
    if has_comment:
        quoted = f"{key}={json.dumps(text.strip(), ensure_ascii=False)}"
        raise BadInput(
            f"Override '{override}' has a '#' that YAML takes for the beginning of a comment, so that only {value!r}"
            f" would be set: write '{quoted}' with both kinds of quotes, or leave out what begins with '#'."
        )
    *parents, last = split(key)
    if key in SHORTHANDS and is_name(value) and isinstance(raw.get(key), dict):
        parents, last = [key], "name"  # the rest of the file's section stays
    target = raw
    for depth, name in enumerate(parents):
        inner = target.get(name)
        if is_name(inner) and depth == 0 and name in SHORTHANDS:
            inner = {"name": inner}
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise BadInput(f"Override '{override}': '{name}' is the value {inner!r}, not a section.")
        target[name] = inner
        target = inner
    target[last] = value
