"""What the guide "Which axis when" says is what the planner says, and its advice follows from it."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from terrazzo import cli
from tests.test_commands import ROOT, commands_of

GUIDE = "docs/guides/axes.md"
PLANS = [command for command in commands_of(GUIDE) if command.startswith("terrazzo plan")]


@cache
def planned(command: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, [*shlex.split(command)[1:], "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def figures(command: str) -> tuple[float, float]:
    """GiB of the fullest rank, and tokens per second of a GPU."""
    found = planned(command)
    return found["memory"]["expected_gib"], found["time"]["tokens_per_s_per_gpu"]


def test_the_tables_have_what_the_commands_print() -> None:
    page = (ROOT / GUIDE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (\d+) \| (?:.* \| )?([\d,]+) \|$", page, re.MULTILINE)
    assert len(rows) == len(PLANS) - 1  # the last one is of a warning
    for command, (gib, tokens) in zip(PLANS, rows, strict=False):
        assert figures(command) == pytest.approx((float(gib), float(tokens.replace(",", ""))), rel=0.1), command


def test_the_advice_follows() -> None:
    memory, speed = zip(*map(figures, PLANS[:-1]), strict=True)
    data, tensor, context = range(3)
    assert speed[data] > max(speed[tensor], speed[context])
    tensor, context = 3, 4
    assert memory[tensor] < memory[context] and speed[tensor] > speed[context]
    data, context, tensor = 5, 6, 7
    assert memory[context] < memory[data] / 4
    assert speed[context] > 0.95 * speed[data] > speed[tensor]
    context, both = 8, 9
    assert memory[both] < 0.8 * memory[context] and speed[both] > 0.98 * speed[context]
    whole, _, experts = 10, 11, 12
    assert memory[experts] < 0.7 * memory[whole] and speed[experts] > speed[whole]
    data, hybrid, stages = 13, 14, 15
    assert speed[stages] > speed[hybrid] > 3 * speed[data]


def test_more_ranks_than_sequences_need_an_axis() -> None:
    alone = re.sub(r" --tp \d+$", "", PLANS[3])
    assert any("384 of 512 rows of a step are empty" in each["reason"] for each in planned(alone)["findings"])


def test_tp_over_hosts_is_warned_of_with_its_time() -> None:
    (found,) = (each for each in planned(PLANS[-1])["findings"] if each["rule"] == "tensor parallelism across hosts")
    assert re.search(r"tp 16 is wider than the 8 ranks .* about 0\.\d+ s in each step", found["reason"])
