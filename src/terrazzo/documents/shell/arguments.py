"""Arguments of a program as a shell script gives them, read without running it.

    parse_arguments("torchrun --nproc-per-node 8 train.py --lr 1e-4 --bf16", "run.sh")
    # {"torchrun": {"nproc-per-node": 8}, "lr": 0.0001, "bf16": True}

Variables and arrays are put in where the script sets them to plain text; an option's value that it is given when it
runs, such as `$1`, stays as it stands, and `${1:-text}` is the text. Where an argument depends on a condition, a loop,
a function or a file that is read, or may stand in a variable that is not set, the script is refused: nothing is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from terrazzo.documents.shell.script import Command, ShellScript
from terrazzo.documents.shell.variables import ShellVariables
from terrazzo.errors import BadInput

__all__ = ["parse_arguments", "write_arguments"]

_LAUNCHER = "torchrun"
_FILES_THAT_LAUNCH = ("distributed/run.py", "distributed/launch.py")
"""torch's launcher by its file: the program comes behind its options."""
_MODULES_THAT_LAUNCH = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_TAKES_MODULE = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed)")
_MODULE = ("-m", "--module")
_ONLY_NAMES = ("[", "test", "echo", "printf", "ls", "cat", "cd")
"""Commands of the shell that start none of their words."""
"""Of these alone: to others `-m` is another word, as to `srun` and `git commit`."""
_OPTION = re.compile(r"(?:--(?=.)|-(?=[A-Za-z][\w-]*(?:=|$)))([^=]*)(?:(=)(.*))?", re.DOTALL)
"""`--name`, `--name=value` or `-n`, but no negative number, and no text such as `-a b`."""
_NUMBER = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
"""Not `007`, which is a name: as a number it could not be written again. `1e3` is one, as rates are written so."""

_MOST_DIGITS = 300
"""Of a whole number: what has more is beyond every float, too."""


def parse_arguments(text: str, origin: str) -> dict[str, Any]:
    """The arguments of the one program that a script starts, or of a file that holds arguments alone.

    Returns:
        Values by the argument without its dashes: True for one without a value, a list for several; what stands
        before the program, for its launcher, is under `torchrun`.

    Raises:
        BadInput: several programs, an argument given two values, one that only a run could tell, or a line of
            arguments that no backslash joins to the program's.
    """
    script = ShellScript(ShellVariables(origin))
    script.run(text)
    command = _chosen(script.commands, origin)
    if command.problem:
        raise BadInput(
            f"'{origin}': {command.problem}, and nothing of a script is run: write the arguments that hold into a file "
            "that ends in .args."
        )
    words, where = command.words, f"'{origin}', from line {command.line} on"
    program = _program(words)
    launcher = _options(_of_launcher(words[: max(program, 0)]), where)
    options = _options(_known(words[program + 1 :], where), where)
    return {**({_LAUNCHER: launcher} if launcher else {}), **options}


def _chosen(commands: list[Command], origin: str) -> Command:
    """The one that starts the program with arguments; of a file of arguments, all as one."""
    if commands and _is_option(commands[0].words[0]):
        problem = next((command.problem for command in commands if command.problem), "")
        return Command(commands[0].line, [word for command in commands for word in command.words], problem)
    for is_one in (_gives_program, _launches, lambda words: any(map(_is_option, words))):
        if found := [command for command in commands if is_one(command.words)]:
            break
    else:
        unknown = next((f": {command.problem}" for command in commands if command.problem), "")
        raise BadInput(f"'{origin}' gives no program an argument: there is nothing to read{unknown}.")
    if len(found) > 1:
        lines = ", ".join(str(command.line) for command in found)
        raise BadInput(f"'{origin}' starts several programs with arguments (lines {lines}): keep one of them.")
    if others := [each.line for each in commands if each is not found[0] and _program(each.words) >= 0]:
        raise BadInput(
            f"'{origin}' starts a program in line {others[0]}, and has the options in line {found[0].line}, with "
            "another command: write the program's options into a file that ends in .args."
        )
    for command in commands:
        if _is_option(command.words[0]):
            raise BadInput(
                f"'{origin}': line {command.line} begins with {command.words[0]}, which the shell takes for a command: "
                "end the line before it with a backslash, behind which nothing stands, and without a comment."
            )
    return found[0]


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _gives_program(words: list[str]) -> bool:
    place = _program(words)
    return place >= 0 and any(map(_is_option, words[place:]))


def _launches(words: list[str]) -> bool:
    return _program(words) >= 0 and any(map(_is_option, words))


def _program(words: list[str]) -> int:
    """Where the program stands; -1 for none.

    It is the first word that ends in `.py`, or one behind it before the next option, as in `python launch.py train.py
    --lr 1`; later ones are values of its options; or the module behind `-m`. Where options come first, there is none:
    they are arguments alone; and behind a command that only tests or shows a file's name, nothing starts.
    """
    if words[:1] and (words[0].startswith("--") or words[0] in _ONLY_NAMES):
        return -1
    program, takes_module = -1, False
    for place, word in enumerate(words):
        is_module = program < 0 and takes_module and words[place - 1] in _MODULE and word not in _MODULES_THAT_LAUNCH
        if is_module or (word.endswith(".py") and not word.endswith(_FILES_THAT_LAUNCH)):
            program = place
        elif program >= 0 and word.startswith("--"):
            break
        takes_module = takes_module or _TAKES_MODULE.fullmatch(word) is not None
    return program


def _of_launcher(words: list[str]) -> list[str]:
    """The words before the program from the first long option on, without names of commands and options of Python."""
    kept, of_python = [], False
    for before, word in zip(["", *words], words, strict=False):
        if _TAKES_MODULE.fullmatch(word):
            of_python = "python" in word
        elif of_python:
            of_python = word not in _MODULES_THAT_LAUNCH and not word.endswith(_FILES_THAT_LAUNCH)
        elif not before.endswith("accelerate"):  # whose verb is `launch`
            kept.append(word)
    first = next((place for place, word in enumerate(kept) if _is_option(word)), len(kept))
    return kept[first : -1 if kept[-1:] and kept[-1] in _MODULE else None]


def _known(words: list[str], where: str) -> list[str]:
    """A program's words. One that the script does not set may hold arguments, unless it is an option's first value."""
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith(("$", "`")) and not (_OPTION.fullmatch(before) and "=" not in before):
            raise BadInput(
                f"{where}: {word[:40]} is not set in this script, and may hold arguments: write the arguments that"
                ' hold into a file that ends in ".args".'
            )
    return words


def _options(words: list[str], where: str) -> dict[str, Any]:
    written: list[tuple[str, list[Any]]] = [("", [])]
    for word in words:
        if word == "--":
            raise BadInput(f"{where}: behind -- stands what is no option, and is not read: leave both out.")
        if option := _OPTION.fullmatch(word):
            name, equals, value = option.groups()
            written.append((name, [_plain(value)] if equals else []))
        else:
            written[-1][1].append(_plain(word))
    options: dict[str, Any] = {}
    for name, values in written[1:]:
        setting = values if len(values) > 1 else values[0] if values else True
        first = options.setdefault(name, setting)
        if (type(first), first) != (type(setting), setting):  # True == 1
            raise BadInput(f"{where}: --{name} is given twice, as {first} and {setting}: keep one of them.")
    return options


def _plain(word: str) -> Any:
    """A number where it is one."""
    if not _NUMBER.fullmatch(word):
        return word
    return int(word) if re.fullmatch(rf"[-+]?\d{{1,{_MOST_DIGITS}}}", word) else float(word)


def write_arguments(document: Mapping[str, Any], program: str) -> str:
    """A script that has torchrun start a program with these arguments. A switch that is off is left out.

    Raises: `BadInput` for a list that no argument can say: an empty one, or one with text that looks like an option.
    """
    arguments = dict(document)
    launcher = arguments.pop(_LAUNCHER, None) or {}
    lines = [
        " ".join([_LAUNCHER, *_line(launcher), program]),
        *(" ".join(_line({name: value})) for name, value in arguments.items()),
    ]
    return "#!/bin/bash\n" + " \\\n    ".join(line for line in lines if line) + "\n"


def _line(arguments: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        given = [] if value is True else value if isinstance(value, list) else [value]
        texts = [str(each) for each in given]
        if value == [] or (len(texts) > 1 and any(text == "--" or _OPTION.fullmatch(text) for text in texts)):
            raise BadInput(f"{name} is {value}, which no argument can say: give it other values, or leave it out.")
        if len(texts) == 1 and texts[0].startswith("-"):
            words.append(f"--{name}={shlex.quote(texts[0])}")
        else:
            words += [f"--{name}", *map(shlex.quote, texts)]
    return words
