"""Arguments of a program as a shell script gives them, read without running it.

    parse_arguments("torchrun --nproc-per-node 8 train.py --lr 1e-4 --bf16", "run.sh")
    # {"torchrun": {"nproc-per-node": 8}, "lr": 0.0001, "bf16": True}

Variables and arrays are put in where the script sets them to plain text; what it is given when it runs, such as `$1`,
stays as it stands. Where an argument depends on a condition or a loop, the file is refused: nothing is run.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

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
_LONGEST = 2**20
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class _Script:
    """What a script sets so far, and the arguments that it starts a program with.

    Attributes:
        set: words by variable; one for a variable that is no array.
        open: lines in which a variable is set where it depends on what happens.
        found: line and words of each statement that starts a program with arguments.
        words: of all statements.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.set: dict[str, list[str]] = {}
        self.open: dict[str, int] = {}
        self.found: list[tuple[int, list[str]]] = []
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
        while at < len(words) and (found := _SET.fullmatch(words[at])):
            self._assign(found, line if depth + max(change, 0) > 0 else 0)
            at += 1
        if at < len(words):
            self._command([each for word in words[at:] for each in self.expand(word)], line)
        return change

    def _command(self, words: list[str], line: int) -> None:
        nested = next((word for word in words if " " in word and ".py " in word), None)
        if nested is not None:  # sh -c "python program.py ..."
            words = [each for word in _words(nested, self.origin) for each in self.expand(word)]
        place = _program(words)
        if place >= 0 and any(word.startswith("--") for word in words[place:]):
            self.found.append((line, words))
        self.words += words

    def _assign(self, found: re.Match[str], line: int) -> None:
        name, more, value = found[1], found[2], found[3]
        if line:
            self.open[name] = line
            return
        if value.startswith(_ARRAY):
            words = [each for word in _words(value[1:], self.origin) for each in self.expand(word)]
            self.set[name] = [*(self.set.get(name, []) if more else []), *words]
        else:
            text = "".join(self.expand(value, split=False))
            self.set[name] = [(self.set.get(name) or [""])[0] + text if more else text]
        if sum(map(len, self.set[name])) > _LONGEST:
            raise BadInput(f"'{self.origin}': ${name} holds text without end.")

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """A word with the script's variables put in, without its quotes; several where they hold several."""
        fields, quoted = [""], False
        for part in _PARTS.findall(word):
            array = _VARIABLE.fullmatch(part.strip('"'))
            if part[0] == "'":
                found, quoted = [part[1:-1]], True
            elif array is not None and array[2] and split:
                found = self._words_of(array)
                if part[0] != '"':
                    found = [each for word in found for each in word.split()]
            elif part[0] == '"':
                found, quoted = [self._filled(part[1:-1])], True
            else:
                text = self._filled(re.sub(r"\\(.)", r"\1", part))
                found = text.split() if split and "$" in part else [text]
            if found:
                fields = [*fields[:-1], fields[-1] + found[0], *found[1:]]
        return [field for field in fields if field or quoted]

    def _filled(self, text: str) -> str:
        return _SUM.sub(_computed, _VARIABLE.sub(lambda found: " ".join(self._words_of(found)), text))

    def _words_of(self, found: re.Match[str]) -> list[str]:
        name = found[1] or found[4]
        if name in self.open:
            raise BadInput(
                f"'{self.origin}': ${name} is set in line {self.open[name]} within a condition, a loop or a function, "
                "and nothing of a script is run: write the arguments that hold into a file that ends in .args."
            )
        if name not in self.set:
            return [found[0] if found[3] is None else found[3]]
        return self.set[name] if found[2] else self.set[name][:1]


def _program(words: list[str]) -> int:
    """Where the program stands; -1 for none."""
    return max((place for place, word in enumerate(words) if word.endswith(".py")), default=-1)


def _tokens(text: str, origin: str) -> Iterator[tuple[str, str]]:
    """Words and ends of statements; an array in brackets is one word, marked by a zero before its content."""
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        assert found is not None
        place = found.end()
        kind, token = str(found.lastgroup), found[0]
        if kind == "word" and token.endswith("=") and text[place : place + 1] == "(":
            end = _closing(text, place, origin)
            token, place = f"{token}{_ARRAY}{text[place + 1 : end]}", end + 1
        yield kind, token


def _closing(text: str, start: int, origin: str) -> int:
    """Where a bracket closes, past quotes and comments."""
    place = start + 1
    while place < len(text):
        found = _TOKEN.match(text, place)
        assert found is not None
        if found[0] == ")":
            return place
        place = found.end()
    raise BadInput(f"'{origin}': the bracket in line {text.count(chr(10), 0, start) + 1} is not closed.")


def _words(text: str, origin: str) -> list[str]:
    return [token for kind, token in _tokens(text, origin) if kind == "word"]


def _computed(found: re.Match[str]) -> str:
    """`$((8*2))` of small whole numbers; else as it stands."""
    text = found[1].replace(" ", "").replace("$", "")
    if not re.fullmatch(r"\d{1,9}(\*\d{1,9}){0,3}", text):
        return found[0]
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
    if len(script.found) > 1:
        lines = ", ".join(str(line) for line, _ in script.found)
        raise BadInput(f"'{origin}' starts several programs with arguments (lines {lines}): keep one of them.")
    words = script.found[0][1] if script.found else script.words
    program = _program(words)
    launcher = _options(words[:program], origin) if program > 0 else {}
    found = _options(words[program + 1 :], origin)
    if not found and not launcher:
        raise BadInput(f"'{origin}' gives no program an argument: there is nothing to read.")
    return {**({_LAUNCHER: launcher} if launcher else {}), **found}


def _options(words: list[str], origin: str) -> dict[str, Any]:
    given: list[tuple[str, list[Any]]] = [("", [])]
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            given.append((name, [_plain(value)] if equals else []))
        else:
            given[-1][1].append(_plain(word))
    found: dict[str, Any] = {}
    for name, values in given[1:]:
        said = values if len(values) > 1 else values[0] if values else True
        if found.setdefault(name, said) != said:
            raise BadInput(f"'{origin}': --{name} is given twice, as {found[name]} and {said}: keep one of them.")
    return found


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
    found = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        given = [] if value is True else value if isinstance(value, list) else [value]
        found += [f"--{name}", *(shlex.quote(str(each)) for each in given)]
    return found
