"""The class of all verbs, and answers to options that a verb does not have.

Most such options are settings of a configuration, which are written without dashes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand

from terrazzo.errors import BadInput
from terrazzo.shell_command import terrazzo_command

__all__ = [
    "SCRIPTS_OWN",
    "OptionAnswer",
    "Verb",
    "answer_init_option",
    "answer_run_option",
    "answer_train_option",
    "verb_answering",
]

OptionAnswer = Callable[[str, str, list[str]], str | None]
"""Answers an option that a verb does not have: gets the option, the value that follows if any, and all arguments."""

SCRIPTS_OWN = {"allow_interspersed_args": False}
"""Settings of a verb that takes a script: all that follows the script belongs to it, options included."""

_FILES = ("-o", "--output", "--out", "--file", "--config", "-c", "-f")
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_RANKS = (
    "--nproc-per-node",
    "--nproc_per_node",
    "--num-processes",
    "--num_processes",
    "--num-gpus",
    "--num_gpus",
    "-n",
)


class Verb(TyperCommand):
    """A command whose help has the paragraphs of the docstring, but not its line breaks: it fits the terminal."""

    def __init__(self, name: str | None, *, help: str | None = None, **rest: Any) -> None:
        super().__init__(name, help=help and re.sub(r"(?<!\n)\n(?!\n)", " ", help), **rest)


def verb_answering(answer_option: OptionAnswer) -> type[Verb]:
    """A class of verbs that answers unknown options; where `answer_option` returns None, typer does."""

    class Answering(Verb):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            words = list(args)
            try:
                return super().parse_args(ctx, args)
            except Exception as error:
                answer = None
                if type(error).__name__ == "NoSuchOption":  # of click, or of typer's own copy of it
                    option = str(getattr(error, "option_name", ""))
                    answer = answer_option(option, _value(option, words), words)
                if answer is None:
                    raise
                raise BadInput(f"'{option}' is no option of `terrazzo {self.name}`: {answer}") from None

    return Answering


def answer_train_option(option: str, value: str, words: list[str]) -> str | None:
    """The answer of verbs that take a configuration: the setting as it is written after the file."""
    if option in _FILES:
        return f"the file stands without one: {value or 'FILE'}."
    if not any(word.lower().endswith(_CONFIGS) for word in words):
        return None
    settings = _settings(option, value)
    return settings and f"settings stand behind the file, without dashes. Write {settings}."


def answer_init_option(option: str, value: str, words: list[str]) -> str | None:
    """The answer of `init`: the file that it writes has all settings."""
    if option in _FILES:
        return f"the file that it writes stands without one: {terrazzo_command()} init {value or 'FILE'}."
    settings = _settings(option, value)
    return settings and f"change the file that it writes, or train with {settings} behind that."


def answer_run_option(option: str, value: str, words: list[str]) -> str | None:
    """The answer of `run`: `--ranks`, for what other launchers call it."""
    return f"write --ranks {value or 'N'}." if option in _RANKS else None


def _value(option: str, words: list[str]) -> str:
    """The value that follows an option; empty if another option does."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            following = words[index + 1] if index + 1 < len(words) else ""
            return value if equals else "" if following.startswith("--") else following
    return ""


def _settings(option: str, value: str) -> str | None:
    """`plan=zero1` for `--plan zero1`; several settings if it may be any of them; None if it is none."""
    from terrazzo.config import keys_meant  # the schema, which --help can do without

    keys = keys_meant(option.lstrip("-").replace("-", "_"))
    shown = [f"{key}={value or _example(key)}" for key in keys]
    return " or ".join(shown) or None


def _example(key: str) -> str:
    from terrazzo.config import CONFIG_KEYS

    return "true" if key in CONFIG_KEYS and CONFIG_KEYS[key].kind is bool else "..."
