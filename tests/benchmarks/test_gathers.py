"""What the table of weights and gradients sent in fewer bits says."""

from __future__ import annotations

from typing import Any

from benchmarks.gathers import SENT, rows


def report(step_s: list[float], link_bytes: int) -> dict[str, Any]:
    return {"step_s": step_s, "link_bytes": [link_bytes] * 3}


def test_ratios_are_medians_within_turns_of_the_slower_rank() -> None:
    plain, sent = report([2.0, 8.0, 1.0], 8_000_000), report([1.0, 2.0, 1.0], 5_000_000)
    first = [sent if gather else plain for _, _, gather in SENT[1]]
    second = [each | {"step_s": [each["step_s"][0], each["step_s"][1], 4.0]} for each in first]
    found = rows(1, [first, second], rate_mbit=100).splitlines()
    assert len(found) == len(SENT[1]) == 16
    assert found[2] == "| `zero3` | bf16 | bf16 | 4.00 | 1.00 | 8.0 | 1.00 | 0.64 |"
    assert found[7] == "| `zero3` | int4 | int8 | 2.00 | 0.50 | 5.0 | 0.62 | 0.40 |"
