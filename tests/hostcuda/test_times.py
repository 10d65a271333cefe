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


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16", 2), ("fp32", 4)])
def test_new_weights_cross_to_the_device_in_their_own_dtype(one_rank: Ranks, precision: str, itemsize: int) -> None:
    ((moved, numel, same),) = one_rank.run(times.updates_on_the_host, precision)
    assert moved == itemsize * numel
    assert same
