"""Virtual time: what each kind of work takes, and that it adds up."""

from __future__ import annotations

import pytest

from tests.hostcuda import times
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test

MATRIX = 8 * 8 * 4  # bytes


def test_kernels_take_their_flops_or_the_bytes_that_they_read_and_write(one_rank: Ranks) -> None:
    (found,) = one_rank.run(times.kernels)
    assert found == {
        "product": {"kernels": 2 * 8**3},
        "sum": {"kernels": 3 * MATRIX},
        "sum in place": {"kernels": 3 * MATRIX},
        "sum out of place": {"kernels": 3 * MATRIX},
        "clearing": {"kernels": MATRIX},
        "beside": {"kernels beside": 2 * MATRIX},
        "copy": {"kernels": 2 * MATRIX},
        "copy in": {"copies in": MATRIX},
        "copy out": {"copies out": MATRIX},
    }


def test_collectives_take_what_a_ring_takes(four_ranks: Ranks) -> None:
    """Four ranks send 1,024 bytes in quarters, each as if 16 longer; the second sum at a quarter of the speed.

    What goes to the next rank alone is one step.
    """
    around = 3 * (256 + 16)
    for heard, took in four_ranks.run(times.collectives):
        assert heard == [
            ("all_gather", True, pytest.approx(around)),
            ("reduce_scatter", True, pytest.approx(around)),
            ("all_reduce", True, pytest.approx(2 * around)),
            ("all_reduce", False, pytest.approx(2 * (4 * 512 + 16))),
            ("all_to_all", True, pytest.approx(around)),
            ("all_to_all", True, pytest.approx(256 + 16)),
        ]
        assert took == pytest.approx(sum(amount for *_, amount in heard))


def test_ranks_wait_for_each_other(two_ranks: Ranks) -> None:
    """By hand: what is sent after 3 s is there after 4, and work of 2 s goes on behind it; and so on."""
    first, second = two_ranks.run(times.meetings)
    ends = {name: (first[name], second[name]) for name in first}
    assert ends == {
        "late_sender": (3 + 1, 3 + 1 + 2),
        "late_receiver": (1, 3 + 1 + 2),
        "receiver_at_work": (1, 3 + 2),
        "ping_pong": (1 + 1 + 2 + 1 + 1, 1 + 1 + 2 + 1),
        "second_first": (3 + 2, 3 + 2),
        "late_rank": (3 + 1 + 1, 3 + 1 + 1),
        "uneven": (2 + 1, 2 + 1),
    }


def test_what_is_waited_for_lasts_until_it_is_there(two_ranks: Ranks) -> None:
    """In a trace, as on a GPU: from when a rank has come to it; a kernel of three seconds, then a message of one."""
    _, spans = two_ranks.run(times.traced_message)
    assert spans == [("recv", 0.0, 4.0), ("kernels", 4.0, 6.0)]


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16", 2), ("fp32", 4)])
def test_new_weights_cross_to_the_device_in_their_own_dtype(one_rank: Ranks, precision: str, itemsize: int) -> None:
    ((moved, numel, same),) = one_rank.run(times.updates_on_the_host, precision)
    assert moved == itemsize * numel
    assert same
