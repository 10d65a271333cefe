"""A converted document as text: YAML with the source's comments at the keys that they spoke of, JSON, or arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.verbs.comments import Comment, comments_of, insert_comments
from terrazzo.documents import Format, Loaded, write_arguments, write_json, write_yaml
from terrazzo.documents.dotted_keys import keys_in
from terrazzo.errors import BadInput

__all__ = ["plain", "to_text"]


def to_text(
    document: Mapping[str, Any], kind: Format, source: Loaded, verdicts: Iterable[KeyVerdict], program: str = ""
) -> str:
    """The document's text; that of the source, comments and all, where nothing has changed.

    Args:
        source: the file that was converted; comments are kept from YAML to YAML.
        verdicts: those of the conversion: they say what each key of the source has become.
        program: the dialect's, for arguments.

    Raises: `BadInput` for TOML, which is only read, and for arguments of a dialect without a program.
    """
    values = plain(document)
    if kind == source.format and values == source.document:
        return source.text
    if kind == "toml":
        raise BadInput("No configuration is written as TOML: name a file that ends in .yaml or .json.")
    if kind == "arguments":
        if not program:
            raise BadInput("Only Megatron-LM's arguments are a script: name a file that ends in .yaml or .json.")
        return write_arguments(values, program)
    if kind == "json":
        return write_json(values)
    text = write_yaml(values)
    if source.format != "yaml":
        return text
    return insert_comments(text, _moved(comments_of(source.text), list(verdicts)))


def _moved(comments: Mapping[str, Comment], verdicts: list[KeyVerdict]) -> dict[str, Comment]:
    """Comments under the keys of the target; those of keys that are gone name them, and lose their place."""
    moved: dict[str, Comment] = {}
    for key, comment in comments.items():
        target = _target(key, verdicts)
        if key and not target:
            comment = Comment([f"{key}: {words}" if words else "" for words in comment.lines()])
        known = moved.setdefault(target, Comment())
        known.above += comment.above
        known.beside += comment.beside
    return moved


def _target(key: str, verdicts: list[KeyVerdict]) -> str:
    """What a key has become. Of a section: the section that all of its keys are in, else what its first key is."""
    if exact := [verdict.target for verdict in verdicts if verdict.key == key and verdict.target]:
        return keys_in(exact[0])[0]
    below = [keys_in(verdict.target)[0] for verdict in verdicts if verdict.target and verdict.key.startswith(f"{key}.")]
    parents = {target.rpartition(".")[0] for target in below}
    if not key or not below:
        return ""
    return parents.pop() if len(parents) == 1 and parents != {""} else below[0]


def plain(value: Any) -> Any:
    """As JSON and YAML know it: mappings, lists, text, numbers, booleans, None."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
