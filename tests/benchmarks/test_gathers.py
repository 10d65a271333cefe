"""What the table of weights gathered in 8 bits says."""

from __future__ import annotations

from typing import Any

from benchmarks.gathers import CONTENDERS, table


def report(step_s: list[float], gathered: int) -> dict[str, Any]:
    promised = {"all_gather": gathered, "reduce_scatter": 4_000_000}
    return {"step_s": step_s, "link_bytes": [sum(promised.values())] * 3, "promised": promised}


def test_ratios_are_medians_within_turns_of_the_slower_rank() -> None:
    plain, sent = report([2.0, 8.0, 1.0], 4_000_000), report([1.0, 2.0, 1.0], 1_000_000)
    first = [sent if gather else plain for _, _, gather in CONTENDERS]
    second = [each | {"step_s": [each["step_s"][0], each["step_s"][1], 4.0]} for each in first]
    rows = table([first, second], rate_mbit=100).splitlines()[2:]
    assert len(rows) == len(CONTENDERS) == 8
    assert rows[0] == "| `zero3` | fp32 | bf16 | 4.00 | 1.00 | 8.0 | 50% | 0.64 |"
    assert rows[1] == "| `zero3` | fp32 | int8 | 2.00 | 0.50 | 5.0 | 20% | 0.40 |"
