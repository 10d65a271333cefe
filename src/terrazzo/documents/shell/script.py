"""The statements of a shell script, followed without running them: which commands it gives arguments, and which."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from terrazzo.documents.limits import MAX_DEPTH
from terrazzo.documents.shell.variables import ShellVariables
from terrazzo.documents.shell.words import Token, tokens
from terrazzo.errors import BadInput

__all__ = ["Command", "ShellScript"]

_CLOSED_BY = {"if": "fi", "for": "done", "select": "done", "while": "done", "until": "done", "case": "esac"} | {
    "{": "}",
    "(": ")",
}
_ONCE = ("if", "case")
"""What runs its statements once at most, where it stands."""
_KEYWORDS = {*_CLOSED_BY, *_CLOSED_BY.values(), "then", "do", "else", "elif", "!", "time", "coproc"}
_SET = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[[^\]]*\]\+?=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_COUNTED = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))")
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_SETTING = ("read", "mapfile", "readarray", "getopts", "let", "unset", "printf")
_SHELL, _TEXT_FOLLOWS = re.compile(r"(?:.*/)?(?:ba)?sh"), re.compile(r"-[a-z]*c")


@dataclass
class Command:
    """A command with its arguments.

    Attributes:
        problem: why some of its words are not known; empty where all are.
        used: variables that it may be given anew, as it may run again or later; with `since`, how many had been set.
    """

    line: int
    words: list[str]
    problem: str = ""
    used: set[str] = field(default_factory=set)
    since: int = 0


class ShellScript:
    """A script, or text within one that a shell is given.

    Attributes:
        commands: in order, without those that only set variables.
    """

    def __init__(self, variables: ShellVariables, *, depth: int = 0, maybe: bool = False) -> None:
        self.variables = variables
        self.commands: list[Command] = []
        self._depth = depth
        self._maybe = maybe
        self._stack: list[tuple[str, int]] = []
        self._words: list[Token] = []
        self._before = ""
        """The mark in front of the statement."""
        self._skips = ""
        """Up to where nothing is a statement: a test, a case's pattern, or a function's brackets."""

    def run(self, text: str) -> None:
        """Follow all of its statements. Raises: `BadInput` for what no shell would take."""
        token = Token("\n", False, 1)
        for token in tokens(text, self.variables.origin):
            if self._skips:
                self._skip(token)
            elif token.is_word:
                self._word(token)
            else:
                self._mark(token)
        self._end(Token("\n", False, token.line))
        if self._stack:
            opening, line = self._stack[-1]
            raise BadInput(f"'{self.variables.origin}': the {opening!r} in line {line} is not closed.")
        for command in self.commands:
            again = [name for name in self.variables.changed[command.since :] if name in command.used]
            if again and not command.problem:
                command.problem = f"${again[0]} is set again for a later turn or call"

    def _skip(self, token: Token) -> None:
        if token.text == self._skips:
            self._skips = ""
        elif token.text == "esac" and self._skips == ")":
            self._skips = ""
            self._word(token)

    def _word(self, token: Token) -> None:
        word, line = token.text, token.line
        first = self._words[0].text if self._words else ""
        if word == "in" and first == "case":
            self._words, self._skips = [], ")"
        elif word == "{" and first == "function":
            self._words, self._stack = [], [*self._stack, ("{", line)]
        elif first:
            self._words.append(token)
        elif word.startswith("(("):
            self._count(word, line)
        elif word == "[[":
            self._skips = "]]"
        elif word in _KEYWORDS:
            self._keyword(token)
        else:
            self._words.append(token)

    def _keyword(self, token: Token) -> None:
        if token.text in _CLOSED_BY:
            self._stack.append((token.text, token.line))
            if token.text in ("for", "select", "case"):
                self._words.append(token)
        elif token.text in _CLOSED_BY.values():
            self._close(token)

    def _close(self, token: Token) -> None:
        if not self._stack or _CLOSED_BY[self._stack[-1][0]] != token.text:
            raise BadInput(f"'{self.variables.origin}': the {token.text!r} in line {token.line} closes nothing.")
        self._stack.pop()
        self._before = token.text

    def _mark(self, token: Token) -> None:
        words = [each.text for each in self._words]
        if token.text == "(" and (len(words) == 1 or words[:1] == ["function"]):
            self._words, self._skips = [], ")"
        elif token.text == "(" and not words:
            self._stack.append(("(", token.line))
        elif token.text == "(":
            raise BadInput(f"'{self.variables.origin}': the '(' in line {token.line} stands behind a word.")
        else:
            self._end(token)
            if token.text == ")":
                self._close(token)
            if token.text in (";;", ";&", ";;&"):
                self._skips = ")"

    # -- statements ------------------------------------------------------------------------------------------------

    def _end(self, mark: Token) -> None:
        """The end of a statement."""
        words, self._words = self._words, []
        if words:
            apart = self._before in ("&&", "||", "|", "|&") or mark.text in ("&", "|", "|&")
            self._statement(words[0].line, [word.text for word in words], self._maybe or apart or bool(self._stack))
        if words or mark.text != "\n":
            self._before = mark.text

    def _statement(self, line: int, words: list[str], maybe: bool) -> None:
        """One statement; `maybe`: whether it runs, or sets anything here, is not known."""
        if words[0] in ("for", "select"):
            self._count(words[-1], line) if words[-1].startswith("((") else self._lose(words[1:2], line)
            return
        assignments = list(itertools.takewhile(_SET.fullmatch, words))
        rest = words[len(assignments) :]
        if not rest:
            for word in assignments:  # each sees those before it
                self._assign([word], line, maybe)
        elif rest[0] in _DECLARING:
            self._declare(rest, line, maybe)
        elif element := _ELEMENT.match(rest[0]):
            self._lose([element[1]], line)
        elif rest[0] != "case":
            self._command(rest, line, maybe)

    def _assign(self, assignments: list[str], line: int, maybe: bool) -> None:
        """Assignments whose right sides are all read before the first is made, but for those of arrays."""
        matches = [match for word in assignments if (match := _SET.fullmatch(word))]
        if maybe:
            self._lose([name for name, _, _ in map(re.Match.groups, matches)], line)
            return
        texts = {match: self.variables.read(match[3]) for match in matches if not match[3].startswith("(")}
        for match in matches:
            value = texts[match] if match in texts else self.variables.read(match[3])
            self.variables.set(match[1], value, more=bool(match[2]))

    def _declare(self, words: list[str], line: int, maybe: bool) -> None:
        options = "".join(word[1:] for word in words[1:] if word.startswith("-"))
        names = [word for word in words[1:] if _NAME.match(word)]
        assignments = [word for word in names if _SET.fullmatch(word)]
        if set(options) - set("aAgrxfFp"):  # such as of numbers, which are worked out
            self._lose(names, line)
        else:
            self._assign(assignments, line, maybe)
        if words[0] == "export" or "x" in options:
            self.variables.exported |= {match[0] for word in names if (match := _NAME.match(word))}

    def _command(self, words: list[str], line: int, maybe: bool) -> None:
        self.variables.begin()
        known = len(self.variables.changed)
        expanded = [each for word in words for each in self.variables.expand(word)]
        problem, used = self.variables.problem, self.variables.used
        if maybe:
            self._lose(self.variables.changed[known:], line)  # by ${name:=value}
        if not expanded:
            return
        name, rest = expanded[0], expanded[1:]
        if name in _SETTING and (name != "printf" or rest[:1] == ["-v"]):
            self._lose(rest, line)
        elif name in ("source", "."):
            self.variables.lose_all(f"the file that line {line} reads", later=maybe)
        elif name == "eval":
            if re.search(r"\$\(|`", " ".join(rest)):
                self.variables.lose_all(f"what line {line} evaluates", later=maybe)
            self._add(self._run(" ".join(rest), self.variables, maybe), line, problem, used)
        elif (text := _text_of_shell(expanded)) is not None:
            self._add(self._run(text, self.variables.inherited(), maybe), line, problem, used)
        else:
            self._add([Command(line, expanded)], line, problem, used)

    def _add(self, commands: list[Command], line: int, problem: str, used: set[str]) -> None:
        """Commands of one statement."""
        again = any(opening not in _ONCE for opening, _ in self._stack)
        for command in commands:
            command.line, command.problem = line, problem or command.problem
            command.used, command.since = used if again else set(), len(self.variables.changed)
        self.commands += commands

    def _run(self, text: str, variables: ShellVariables, maybe: bool) -> list[Command]:
        """The commands of text that a shell is given as a script."""
        if self._depth > MAX_DEPTH:
            raise BadInput(f"'{variables.origin}' evaluates text more than {MAX_DEPTH} deep.")
        inner = ShellScript(variables, depth=self._depth + 1, maybe=maybe)
        inner.run(text)
        return inner.commands

    # -- what is not known -----------------------------------------------------------------------------------------

    def _lose(self, words: list[str], line: int) -> None:
        for word in words:
            if name := _NAME.match(word):
                where = f"is set in line {line} within a condition, a loop or a function, or as the script runs"
                self.variables.lose(name[0], f"${name[0]} {where}")

    def _count(self, arithmetic: str, line: int) -> None:
        """`((...))`: the variables that it sets."""
        self._lose([one or other for one, other in _COUNTED.findall(arithmetic)], line)


def _text_of_shell(words: list[str]) -> str | None:
    """The text that `sh -c` or `bash -lc` is to run; None for other commands."""
    shell = next((place for place, word in enumerate(words) if _SHELL.fullmatch(word)), len(words))
    behind = itertools.pairwise(words[shell + 1 :])
    return next((text for option, text in behind if _TEXT_FOLLOWS.fullmatch(option)), None)
