"""The variables of a shell script as far as they are known without running it, and words with these put in."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from terrazzo.documents.limits import MAX_BYTES
from terrazzo.documents.shell.words import behind, tokens
from terrazzo.errors import BadInput

__all__ = ["ShellVariables"]

_PIECE = re.compile(r"\$[A-Za-z_]\w*|\$[0-9@*#?$!-]|[^\\'\"$`<>(]+|.", re.DOTALL)
_BRACES = re.compile(r"\$\{([A-Za-z_]\w*|[0-9]+|[@*])(?:\[([@*]|\d{1,6})\])?(?:(:?[-=+?])(.*))?\}", re.DOTALL)
_NAMED = re.compile(r"\$\{[!#]?([A-Za-z_]\w*|[@*])")
_SEVERAL = re.compile(r"\{[^{}]*(?:,|\.\.)")
_ESCAPED = re.compile(r"\\([$`\"\\\n])")


class AssignedValue(NamedTuple):
    """What a variable is to hold, and why that is not known; empty where it is."""

    words: list[str]
    array: bool
    problem: str


class ShellVariables:
    """Values by variable, and why others have none that is known.

    Attributes:
        exported: names that a shell within the script is told.
        changed: names as they are set or lost, in order.
        used: names that words have been asked for since `begin`.
        problem: why one of these words is not known; empty where all are.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.exported: set[str] = set()
        self.changed: list[str] = []
        self._values: dict[str, list[str]] = {}
        self._unknown: dict[str, str] = {}
        self._all_unknown = ""
        self._budget = 4 * MAX_BYTES
        self.begin()

    def begin(self) -> None:
        """Forget what has been used."""
        self.used: set[str] = set()
        self.problem = ""

    # -- setting them ----------------------------------------------------------------------------------------------

    def read(self, value: str) -> AssignedValue:
        """The right side of an assignment: text with its quotes, or an array in brackets."""
        self.begin()
        array = value.startswith("(")
        words = self._elements(value[1:-1]) if array else self.expand(value, split=False) or [""]
        return AssignedValue(words, array, self.problem)

    def set(self, name: str, value: AssignedValue, *, more: bool = False) -> None:
        """What an assignment says; `more` for `+=`."""
        self._check_separators(name)
        self.changed.append(name)
        words, array, problem = value
        had = self._values.get(name, [])
        if more:
            words = [*had, *words] if array else ["".join(had[:1]) + words[0], *had[1:]]
        self._values[name] = words
        if problem:
            self.lose(name, problem)

    def lose(self, name: str, why: str) -> None:
        """The script does not show what a variable holds, here or, as a function may set it, further down."""
        self._check_separators(name)
        self._unknown.setdefault(name, why)
        self.changed.append(name)

    def lose_all(self, by: str, *, later: bool) -> None:
        """The same of all that are set, which something may set again; with `later`, also of those that will be."""
        for name in self._values:
            self.lose(name, f"${name} may be set by {by}")
        self._all_unknown = self._all_unknown or (by if later else "")

    def _check_separators(self, name: str) -> None:
        if name == "IFS":
            raise BadInput(
                f"'{self.origin}' sets $IFS, by which the shell divides what variables hold into arguments: that"
                ' is not followed here. Write the arguments into a file that ends in ".args", or take that line out.'
            )

    def inherited(self) -> ShellVariables:
        """Those of a shell that the script starts."""
        inner = ShellVariables(self.origin)
        inner._unknown, inner._all_unknown, inner.exported = dict(self._unknown), self._all_unknown, set(self.exported)
        for name, words in self._values.items():
            if name in self.exported:
                inner._values[name] = words
            else:
                inner.lose(name, f"${name} is set without `export`, and used in another shell")
        return inner

    # -- words -----------------------------------------------------------------------------------------------------

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """A word without its quotes, and with the variables that are set put in; several where they hold several.

        What the script is given when it runs, such as `$1` or `$(date)`, stays as it stands.
        """
        fields = _Fields(split)
        self._put(word, fields)
        fields.end()
        return fields.done

    def _put(self, word: str, fields: _Fields) -> None:
        place = 0
        while place < len(word):
            piece = _PIECE.match(word, place)
            assert piece is not None
            end = piece.end()
            if word[place] in "\\'\"`(" or word.startswith(("$(", "${", "$'", '$"', "<(", ">("), place):
                end = behind(word, place, self.origin)
            self._piece(word[place:end], fields)
            place = end

    def _piece(self, piece: str, fields: _Fields) -> None:
        if piece[0] == "\\":
            if piece != "\\\n":
                fields.add(piece[1:])
        elif piece.startswith(("'", "$'")):
            fields.add(piece[piece.index("'") + 1 : -1])
            if piece[0] == "$" and "\\" in piece:
                self._fails(f"{piece[:40]} has a backslash, which stands for another character")
        elif piece.startswith(('"', '$"')):
            self._put_quoted(piece[piece.index('"') + 1 : -1], fields)
        elif piece[0] in "$`" and len(piece) > 1:
            self._variable(piece, fields, quoted=False)
        elif piece[0] in "<>(":
            fields.add(piece)
        else:
            if fields.split and _SEVERAL.search(piece):
                self._fails(f"{piece[:40]} stands for several words")
            fields.add_unquoted(piece)

    def _put_quoted(self, text: str, fields: _Fields) -> None:
        """What stands in double quotes."""
        if not text:
            fields.add("")
        place = 0
        while place < len(text):
            piece = _PIECE.match(text, place)
            assert piece is not None
            end = piece.end()
            if escaped := _ESCAPED.match(text, place):
                end = escaped.end()
                fields.add("" if escaped[1] == "\n" else escaped[1])
            elif text[place] == "`" or text.startswith(("$(", "${"), place):
                end = behind(text, place, self.origin)
                self._variable(text[place:end], fields, quoted=True)
            elif text[place] == "$" and end > place + 1:
                self._variable(piece[0], fields, quoted=True)
            else:
                fields.add(piece[0])
            place = end

    # -- one variable ----------------------------------------------------------------------------------------------

    def _variable(self, piece: str, fields: _Fields, *, quoted: bool) -> None:
        """Put in `$name`, `${...}` or `$(...)`."""
        if piece.startswith(("$(", "`")):
            fields.add(self._computed(piece) if piece.startswith("$((") else piece)
            return
        parts = _BRACES.fullmatch(piece if piece[1] == "{" else f"${{{piece[1:]}}}")
        if parts is None:
            named = _NAMED.match(piece)
            if named is not None and (named[1] in "@*" or named[1] in self._values or named[1] in self._unknown):
                self._fails(f"{piece[:40]} is worked out when the script runs")
            fields.add(piece)
            return
        name, place, sign, other = parts.groups()
        if name in "@*":
            self._fails(f"{piece[:40]} is what the script is given")
        words = self._words(name)
        if sign and _takes_other(words, sign):
            self._put_other(name, sign, other, fields, quoted=quoted)
        elif words is None:
            if not sign or sign[-1] != "+":
                fields.add(piece)
        else:
            at = 0 if place is None else place if place in "@*" else int(place)
            fields.add_words(words if isinstance(at, str) else words[at:][:1], quoted=quoted, apart=at == "@")

    def _words(self, name: str) -> list[str] | None:
        """What a variable holds; None where the script does not set it."""
        self.used.add(name)
        words = self._values.get(name)
        if name in self._unknown or (self._all_unknown and words is not None):
            self._fails(self._unknown.get(name, f"${name} may be set by {self._all_unknown}"))
        self._budget -= sum(map(len, words or ()))
        if self._budget < 0:
            raise BadInput(f"'{self.origin}': ${name} holds text without end.")
        return words

    def _put_other(self, name: str, sign: str, other: str, fields: _Fields, *, quoted: bool) -> None:
        """What stands behind the sign in `${name:-other}`."""
        if quoted:
            self._put_quoted(other.replace('"', ""), fields)
        else:
            self._put(other, fields)
        if sign[-1] == "=":
            self._values[name] = self.expand(other, split=False) or [""]
            self.changed.append(name)

    def _computed(self, arithmetic: str) -> str:
        """`$((8*2))` of small whole numbers, also in variables; else as it stands."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", self._number, arithmetic[3:-2]).replace(" ", "")
        if not re.fullmatch(r"{0}(\*{0}){{0,3}}".format(r"(?:0|[1-9]\d{0,8})"), text):  # 010 is in base 8
            return arithmetic
        return str(math.prod(int(factor) for factor in text.split("*")))

    def _number(self, named: re.Match[str]) -> str:
        return "".join((self._words(named[1]) or [named[0]])[:1])

    def _elements(self, text: str) -> list[str]:
        """The words of an array."""
        words: list[str] = []
        for token in tokens(text, self.origin):
            if token.is_word and not re.match(r"\[[^\]]*\]=", token.text):
                words += self.expand(token.text)
            elif token.text != "\n":
                self._fails(f"{token.text[:40]} stands in an array")
        return words

    def _fails(self, why: str) -> None:
        self.problem = self.problem or why


def _takes_other(words: list[str] | None, sign: str) -> bool:
    """Whether `${name:-other}` and its kin mean `other`. What the script does not set is taken for unset."""
    missing = words is None or (sign[0] == ":" and "".join(words[:1]) == "")
    return {"-": missing, "=": missing, "+": not missing, "?": False}[sign[-1]]


class _Fields:
    """What a word comes to, as it is put together."""

    def __init__(self, split: bool) -> None:
        self.split = split
        self.done: list[str] = []
        self._last: str | None = None

    def add(self, text: str) -> None:
        """Text that is one with what stands before it, also if it is empty."""
        self._last = (self._last or "") + text

    def end(self) -> None:
        """What follows is the next word."""
        if self._last is not None:
            self.done.append(self._last)
        self._last = None

    def add_unquoted(self, text: str) -> None:
        """Text that is split at its blanks."""
        if not self.split:
            self.add(text)
            return
        if text[:1].isspace():
            self.end()
        for place, word in enumerate(text.split()):
            if place:
                self.end()
            self.add(word)
        if text[-1:].isspace():
            self.end()

    def add_words(self, words: list[str], *, quoted: bool, apart: bool) -> None:
        """What a variable holds: one word, or those of an array."""
        if not self.split or (quoted and not apart):
            self.add(" ".join(words))
            return
        for place, word in enumerate(words):
            if place:
                self.end()
            if quoted:
                self.add(word)
            else:
                self.add_unquoted(word)
