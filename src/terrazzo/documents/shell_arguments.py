"""Arguments of a program as a shell script gives them, read without running it.

    parse_arguments("torchrun --nproc-per-node 8 train.py --lr 1e-4 --bf16", "run.sh")
    # {"torchrun": {"nproc-per-node": 8}, "lr": 0.0001, "bf16": True}

Variables and arrays are put in where the script sets them to plain text; what it is given when it runs, such as `$1`,
stays as it stands. Where an argument depends on a condition or a loop, the file is refused: nothing is run.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from terrazzo.documents.limits import MAX_BYTES
from terrazzo.errors import BadInput

__all__ = ["parse_arguments", "write_arguments"]

_LAUNCHER, _PROGRAM = "torchrun", "pretrain_gpt.py"
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|\\\n|(?<![^\s;(&|])\#[^\n]*)"""
    r"""|(?P<end>\n|;|&&|\|\||&|\|)"""
    r"""|(?P<word>(?:'[^']*'|"(?:[^"\\]|\\.)*"|\$\(\([^()]*\)\)|\$\([^()]*\)|\$\{[^}]*\}|\\.|[^\s;&|'"\\()<>])+)"""
    r"""|(?P<other>.)""",
    re.DOTALL,
)
_SET = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(\[[@*]\])?(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_PARTS = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|[^'"]+""", re.DOTALL)
_ARRAY = "\0"
"""What the value of an array begins with, in place of its bracket."""
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_OPENING, _CLOSING = {"if", "for", "while", "until", "case", "{"}, {"fi", "done", "esac", "}"}
_KEYWORDS = {*_OPENING, *_CLOSING, "then", "do", "else", "elif", "export", "exec", "local"}
_SHELL, _TEXT_FOLLOWS = re.compile(r"(?:.*/)?(?:ba)?sh"), re.compile(r"-[a-z]*c")
_FILES_THAT_LAUNCH = ("distributed/run.py", "distributed/launch.py")
"""torch's launcher by its file: the program comes behind its options."""
_NUMBER = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
"""Not `007`, which is a name: as a number it could not be written again. `1e3` is one, as rates are written so."""


class _Script:
    """What a script sets so far, and the arguments that it starts a program with.

    Attributes:
        set: words by variable; one for a variable that is no array.
        open: lines in which a variable is set where it depends on what happens.
        programs: line and words of each statement that starts a program with arguments.
        words: of all statements.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.set: dict[str, list[str]] = {}
        self.open: dict[str, int] = {}
        self.programs: list[tuple[int, list[str]]] = []
        self.words: list[str] = []

    def run(self, text: str) -> None:
        depth, line, statement = 0, 1, list[str]()
        for kind, token in _tokens(text, self.origin):
            if kind == "word":
                statement.append(token)
            elif kind == "end":
                depth += self._statement(statement, depth, line)
                statement = []
            line += token.count("\n")
        self._statement(statement, depth, line)

    def _statement(self, words: list[str], depth: int, line: int) -> int:
        """One statement; how much deeper it makes what follows."""
        change, at = 0, 0
        while at < len(words) and words[at] in _KEYWORDS:
            change += (words[at] in _OPENING) - (words[at] in _CLOSING)
            at += 1
        while at < len(words) and (assignment := _SET.fullmatch(words[at])):
            self._assign(assignment, line if depth + max(change, 0) > 0 else 0)
            at += 1
        if at < len(words):
            self._command([each for word in words[at:] for each in self.expand(word)], line)
        return change

    def _command(self, words: list[str], line: int) -> None:
        if (nested := _text_of_shell(words)) is not None:
            words = [each for word in _words(nested, self.origin) for each in self.expand(word)]
        place = _program(words)
        if place >= 0 and any(word.startswith("--") for word in words[place:]):
            self.programs.append((line, words))
        self.words += words

    def _assign(self, assignment: re.Match[str], line: int) -> None:
        name, more, value = assignment[1], assignment[2], assignment[3]
        if line:
            self.open[name] = line
            return
        if value.startswith(_ARRAY):
            words = [each for word in _words(value[1:], self.origin) for each in self.expand(word)]
            self.set[name] = [*(self.set.get(name, []) if more else []), *words]
        else:
            text = "".join(self.expand(value, split=False))
            self.set[name] = [(self.set.get(name) or [""])[0] + text if more else text]
        if sum(map(len, self.set[name])) > MAX_BYTES:
            raise BadInput(f"'{self.origin}': ${name} holds text without end.")

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """A word with the script's variables put in, without its quotes; several where they hold several."""
        fields, quoted = [""], False
        for part in _PARTS.findall(word):
            array = _VARIABLE.fullmatch(part.strip('"'))
            if part[0] == "'":
                pieces, quoted = [part[1:-1]], True
            elif array is not None and array[2] and split:
                pieces = self._words_of(array)
                if part[0] != '"':
                    pieces = [each for word in pieces for each in word.split()]
            elif part[0] == '"':
                pieces, quoted = [self._filled(part[1:-1])], True
            else:
                text = self._filled(re.sub(r"\\(.)", r"\1", part))
                pieces = text.split() if split and "$" in part else [text]
            if pieces:
                fields = [*fields[:-1], fields[-1] + pieces[0], *pieces[1:]]
        return [field for field in fields if field or quoted]

    def _filled(self, text: str) -> str:
        return _SUM.sub(_computed, _VARIABLE.sub(lambda variable: " ".join(self._words_of(variable)), text))

    def _words_of(self, variable: re.Match[str]) -> list[str]:
        name = variable[1] or variable[4]
        if name in self.open:
            raise BadInput(
                f"'{self.origin}': ${name} is set in line {self.open[name]} within a condition, a loop or a function, "
                "and nothing of a script is run: write the arguments that hold into a file that ends in .args."
            )
        if name not in self.set:
            return [variable[0] if variable[3] is None else variable[3]]
        return self.set[name] if variable[2] else self.set[name][:1]


def _text_of_shell(words: list[str]) -> str | None:
    """The text that `sh -c` or `bash -lc` is to run; None for other commands."""
    shell = next((place for place, word in enumerate(words) if _SHELL.fullmatch(word)), len(words))
    behind = itertools.pairwise(words[shell + 1 :])
    return next((text for option, text in behind if _TEXT_FOLLOWS.fullmatch(option)), None)


def _program(words: list[str]) -> int:
    """Where the program stands; -1 for none.

    It is the first word that ends in `.py`, or one behind it before the next option, as in `python launch.py train.py
    --lr 1`; later ones are values of its options. Where options come first, there is none: they are arguments alone.
    """
    if words[:1] and words[0].startswith("--"):
        return -1
    program = -1
    for place, word in enumerate(words):
        if word.endswith(".py") and not word.endswith(_FILES_THAT_LAUNCH):
            program = place
        elif program >= 0 and word.startswith("--"):
            break
    return program


def _tokens(text: str, origin: str) -> Iterator[tuple[str, str]]:
    """Words and ends of statements; an array in brackets is one word, marked by a zero before its content."""
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None
        place = match.end()
        kind, token = str(match.lastgroup), match[0]
        if kind == "word" and token.endswith("=") and text[place : place + 1] == "(":
            end = _closing(text, place, origin)
            token, place = f"{token}{_ARRAY}{text[place + 1 : end]}", end + 1
        yield kind, token


def _closing(text: str, start: int, origin: str) -> int:
    """Where a bracket closes, past quotes and comments."""
    place = start + 1
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None
        if match[0] == ")":
            return place
        place = match.end()
    raise BadInput(f"'{origin}': the bracket in line {text.count(chr(10), 0, start) + 1} is not closed.")


def _words(text: str, origin: str) -> list[str]:
    return [token for kind, token in _tokens(text, origin) if kind == "word"]


def _computed(arithmetic: re.Match[str]) -> str:
    """`$((8*2))` of small whole numbers; else as it stands."""
    text = arithmetic[1].replace(" ", "").replace("$", "")
    if not re.fullmatch(r"\d{1,9}(\*\d{1,9}){0,3}", text):
        return arithmetic[0]
    return str(math.prod(int(factor) for factor in text.split("*")))


def parse_arguments(text: str, origin: str) -> dict[str, Any]:
    """The arguments of the one program that a script starts, or of a file that holds arguments alone.

    Returns:
        Values by the argument without its dashes: True for one without a value, a list for several; what stands
        before the program, for its launcher, is under `torchrun`.

    Raises:
        BadInput: several programs, an argument given two values, or one that a condition decides.
    """
    script = _Script(origin)
    script.run(text)
    if len(script.programs) > 1:
        lines = ", ".join(str(line) for line, _ in script.programs)
        raise BadInput(f"'{origin}' starts several programs with arguments (lines {lines}): keep one of them.")
    words = script.programs[0][1] if script.programs else script.words
    program = _program(words)
    launcher = _options(words[:program], origin) if program > 0 else {}
    options = _options(words[program + 1 :], origin)
    if not options and not launcher:
        raise BadInput(f"'{origin}' gives no program an argument: there is nothing to read.")
    return {**({_LAUNCHER: launcher} if launcher else {}), **options}


def _options(words: list[str], origin: str) -> dict[str, Any]:
    written: list[tuple[str, list[Any]]] = [("", [])]
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            written.append((name, [_plain(value)] if equals else []))
        else:
            written[-1][1].append(_plain(word))
    options: dict[str, Any] = {}
    for name, values in written[1:]:
        setting = values if len(values) > 1 else values[0] if values else True
        if options.setdefault(name, setting) != setting:
            raise BadInput(f"'{origin}': --{name} is given twice, as {options[name]} and {setting}: keep one of them.")
    return options


def _plain(word: str) -> Any:
    """A number where it is one."""
    if not _NUMBER.fullmatch(word):
        return word
    return int(word) if re.fullmatch(r"[-+]?\d{1,18}", word) else float(word)


def write_arguments(document: Mapping[str, Any]) -> str:
    """A script that starts Megatron-LM's program with these arguments. A switch that is off is left out."""
    arguments = dict(document)
    launcher = arguments.pop(_LAUNCHER, None) or {}
    lines = [
        " ".join([_LAUNCHER, *_line(launcher), _PROGRAM]),
        *(" ".join(_line({name: value})) for name, value in arguments.items()),
    ]
    return "#!/bin/bash\n" + " \\\n    ".join(line for line in lines if line) + "\n"


def _line(arguments: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        texts = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *(shlex.quote(str(each)) for each in texts)]
    return words
