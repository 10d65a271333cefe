"""What messages are made of."""

from __future__ import annotations

from terrazzo.errors import listed


def test_a_long_list_says_how_much_it_leaves_out() -> None:
    assert listed([]) == ""
    assert listed("abc") == "a, b, c"
    assert listed(range(9), 4) == "0, 1, 2, 3 and 5 more"
    assert listed(["a b", "c d", "e f"], 2, ";") == "a b; c d and 1 more"
