"""The text of a shell script as words with their quotes, and marks; without comments and redirections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from terrazzo.documents.limits import MAX_DEPTH
from terrazzo.errors import BadInput

__all__ = ["Token", "behind", "tokens"]

_SKIPPED = re.compile(r"(?:[ \t\r]|\\\n)+|#[^\n]*")
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(?:&>>?|<<<|<<-?|[<>]&|<>|>>|>\||[<>](?!\())")
_MARK = re.compile(r";;&|;;|;&|;|&&|&|\|\||\|&|\||\(|\)|\n")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"`$]+|\$(?![({'\"])")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_OPENING = re.compile(r"\$\(|\$\{|\$?'|\$?\"|`|\\|[<>]?\(")
_CLOSING = {"$(": ")", "(": ")", "<(": ")", ">(": ")", "${": "}", '"': '"', '$"': '"', "`": "`"}
_INSIDE = {
    ")": re.compile(r"""\\.|'[^']*'|\$'(?:[^'\\]|\\.)*'|(?<=\s)\#[^\n]*|\$?\(|\$\{|\$?"|`|\)""", re.DOTALL),
    "}": re.compile(r"""\\.|'[^']*'|\$'(?:[^'\\]|\\.)*'|\$\(|\$\{|\$?"|`|\}""", re.DOTALL),
    '"': re.compile(r"""\\.|\$\(|\$\{|`|\"""", re.DOTALL),
    "`": re.compile(r"""\\.|`""", re.DOTALL),
}
"""What counts on the way to each closing mark: what is skipped as one, what opens another, and the mark."""


class Token(NamedTuple):
    """A word with its quotes, or a mark: what ends a statement, or a round bracket.

    Attributes:
        line: where it begins, from 1.
    """

    text: str
    is_word: bool
    line: int


def tokens(text: str, origin: str) -> Iterator[Token]:
    """All words and marks; `name=(...)` and `((...))` are one word each. Raises: `BadInput` for what is not closed."""
    place, line, counted = 0, 1, 0
    endings: list[tuple[str, bool]] = []
    while place < len(text):
        line, counted = line + text.count("\n", counted, place), place
        if skipped := _SKIPPED.match(text, place):
            place = skipped.end()
        elif redirection := _REDIRECTION.match(text, place):
            start, place = _target(text, redirection.end(), origin)
            if redirection[0].endswith(("<<", "<<-")) and not redirection[0].endswith("<<<"):
                endings.append((re.sub(r"[\\'\"]", "", text[start:place]), redirection[0].endswith("-")))
        elif text.startswith("((", place) or not (mark := _MARK.match(text, place)):
            start, place = place, _word(text, place, origin)
            yield Token(text[start:place], True, line)
        else:
            place = mark.end()
            yield Token(mark[0], False, line)
            while mark[0] == "\n" and endings:
                place = _behind_document(text, place, *endings.pop(0), origin)


def _target(text: str, place: int, origin: str) -> tuple[int, int]:
    """The word that a redirection names, from and to."""
    while skipped := _SKIPPED.match(text, place):
        place = skipped.end()
    end = _word(text, place, origin)
    if end == place:
        raise BadInput(f"'{origin}': the redirection in line {_line(text, place)} names nothing.")
    return place, end


def _behind_document(text: str, place: int, ending: str, indented: bool, origin: str) -> int:
    start = place
    while place < len(text):
        end = text.find("\n", place)
        line, place = (text[place:end], end + 1) if end >= 0 else (text[place:], len(text))
        if (line.lstrip("\t") if indented else line).rstrip("\r") == ending:
            return place
    raise BadInput(f"'{origin}': the text from line {_line(text, start)} on has no end, a line {ending!r}.")


def _word(text: str, place: int, origin: str) -> int:
    """Where a word ends that begins here."""
    start = place
    while place < len(text):
        if plain := _PLAIN.match(text, place):
            place = plain.end()
            continue
        opening = _OPENING.match(text, place)
        if opening is None or (opening[0] == "(" and not _opens(text, start, place)):
            break
        if opening[0] in ("<(", ">(") and place > start:
            break
        place = behind(text, place, origin)
    return place


def _opens(text: str, start: int, place: int) -> bool:
    """Whether a bracket belongs to the word: of an array, or of arithmetic."""
    return _ARRAY.fullmatch(text, start, place) is not None or (start == place and text.startswith("((", place))


def behind(text: str, start: int, origin: str) -> int:
    """The place behind the quote, substitution, bracket or escaped character that begins at `start`.

    Raises: `BadInput` where it is not closed, or nested too deep.
    """
    if text[start] == "\\":
        return start + 2
    opening = _OPENING.match(text, start)
    assert opening is not None
    if opening[0].endswith("'"):
        quoted = re.compile(r"'[^']*'" if opening[0] == "'" else r"\$'(?:[^'\\]|\\.)*'", re.DOTALL).match(text, start)
        if quoted is None:
            raise _not_closed(text, start, opening[0], origin)
        return quoted.end()
    closing, place = [_CLOSING[opening[0]]], opening.end()
    while closing:
        found = _INSIDE[closing[-1]].search(text, place)
        if found is None:
            raise _not_closed(text, start, opening[0], origin)
        place = found.end()
        if found[0] == closing[-1]:
            closing.pop()
        elif found[0] in _CLOSING:
            closing.append(_CLOSING[found[0]])
            if len(closing) > MAX_DEPTH:
                raise BadInput(
                    f"'{origin}': brackets in line {_line(text, start)} are nested more than {MAX_DEPTH} deep."
                )
    return place


def _not_closed(text: str, start: int, opening: str, origin: str) -> BadInput:
    kind = "bracket" if opening.endswith(("(", "{")) else "quote"
    return BadInput(f"'{origin}': the {kind} in line {_line(text, start)} is not closed.")


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
