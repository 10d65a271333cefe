"""What messages are made of."""

from __future__ import annotations

from typing import Any

import pytest

from terrazzo.exit_codes import BROKEN, UNREAD, reason_of
from terrazzo.messages import counted, did_you_mean, listed, nearest, of_ranks, warn


def test_a_long_list_says_how_much_it_leaves_out() -> None:
    assert listed([]) == ""
    assert listed("abc") == "a, b, c"
    assert listed(range(9), 4) == "0, 1, 2, 3 and 5 more"
    assert [of_ranks([3]), of_ranks({2, 0}), of_ranks(range(4), 2)] == ["rank 3", "ranks 0, 2", "ranks 0, 1 and 2 more"]
    assert listed(["a b", "c d", "e f"], 2, ";") == "a b; c d and 1 more"


def test_the_nearest_word_is_one_whatever_its_capitals() -> None:
    names = ["Adam", "AdamW", "Adamax", "SGD"]
    assert [nearest(word, names) for word in ("adamww", "ADAM", "sdg", "lamb?!")] == ["AdamW", "Adam", "SGD", ""]
    assert nearest("stepz", ["steps"], 0.9) == "" and did_you_mean("Adamw", names) == " Did you mean 'AdamW'?"


def test_a_code_is_of_a_kill_where_there_is_such_a_signal() -> None:
    codes = {137: "killed", 143: "killed", 200: "failed", 255: "failed", 3: "failed"}
    of_verbs = {BROKEN: "failed", UNREAD: "killed"}  # which mean nothing of the kind where a rank ends with them
    assert {code: reason_of(code) for code in codes | of_verbs} == codes | of_verbs


def test_a_number_of_things_in_words() -> None:
    assert [counted(number, "CPU rank") for number in (0, 1, 2)] == ["no CPU ranks", "1 CPU rank", "2 CPU ranks"]


@pytest.mark.parametrize("between", [0, 1, 7])
def test_a_warning_names_the_line_that_called_into_the_package(between: int) -> None:
    module: dict[str, Any] = {"__name__": "terrazzo.engine.anywhere", "warn": warn}
    exec("def entry(between): return entry(between - 1) if between else warn('so')", module)
    with pytest.warns(UserWarning, match="so") as caught:
        module["entry"](between)
    assert [warning.filename for warning in caught] == [__file__]
