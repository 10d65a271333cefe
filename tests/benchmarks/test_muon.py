"""What the tables of Muon beside DDP and AdamW say."""

from __future__ import annotations

from benchmarks.cpu.outcome import Outcome
from benchmarks.cpu.rank import Steps
from benchmarks.muon import OWN, PEER, losses_table, steps_table


def outcome(name: str, slower_s: list[float], peak_bytes: int) -> Outcome:
    turns = [[Steps([0.5], [0.25], [1.0]), Steps([seconds], [0.25], [1.0])] for seconds in slower_s]
    return Outcome(name, 0, turns, peak_bytes, peak_bytes, sent_bytes=2_500_000)


def test_ratios_are_medians_within_turns_of_the_slower_rank() -> None:
    peer, own = outcome(PEER, [2.0, 8.0, 1.0], 100_000_000), outcome(OWN[0], [1.0, 2.0, 3.0], 80_000_000)
    rows = steps_table({2: [peer, own]}).splitlines()[2:]
    assert rows == [
        "| 2 | ddp | 2000 | 1.00 | 250 | 100 | 1.00 |  |",
        "| 2 | zero1 | 2000 | 0.50 | 250 | 80 | 0.80 | 2.5 |",
    ]


def test_losses_stand_beside_their_mean() -> None:
    assert losses_table({"Muon": [1.5, 1.25, 1.0]}).splitlines()[2] == "| Muon | 1.5000 | 1.2500 | 1.0000 | 1.2500 |"
