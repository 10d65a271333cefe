"""The ten questions of the guide: the commands that it gives, and the arithmetic that it does."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.planner import Request, build_setup
from terrazzo.planner.timing.pipeline_step import PipelineStep

PAGE = Path(__file__).parents[2] / "docs/guides/planning-questions.md"
COMMANDS = re.findall(r"^\*\*\d+\. .*?\*\* `terrazzo (.+)`$", PAGE.read_text(), re.MULTILINE)
EIGHT, SEVENTY, LAYERS, WIDTH, VOCABULARY = 8_030_261_248, 70_553_706_496, 32, 4_096, 128_256
ROOT = 2 * VOCABULARY * WIDTH + WIDTH
"""Parameters of the embedding, the head and the last norm."""
CARD = 79.11 * 2**30
FOUR_STAGES: dict[str, Any] = {"gpu": "h100-sxm", "pp": 4, "micro_batches": 16, "sequence": 4096}
Answer = dict[str, Any]


def term(answer: Answer, name: str, where: str = "breakdown") -> float:
    values: list[float] = [each["value"] for each in answer["memory"][where] if each["name"] == name]
    assert len(values) == 1, name
    return values[0]


def sent(answer: Answer, name: str) -> float:
    (gb,) = (each["gb"] for each in answer["traffic"]["collectives"] if each["name"] == name)
    return float(gb) * 1e9


def states_of_eight(answer: Answer) -> None:
    assert answer["plans"][0]["per_rank"]["states_gb"] * 1e9 == pytest.approx(18 * EIGHT)
    assert 18 * EIGHT > CARD and not answer["plans"][0]["fits"]


def fewest(answer: Answer) -> None:
    assert answer["sizing"]["states_floor_gpus"] == ceil(16 * SEVENTY / CARD) == 14
    assert answer["setup"]["gpus"] == 32 and answer["fits_surely"]


def gathered_again(answer: Answer) -> None:
    assert sent(answer, "all_gather weights") == (4 * EIGHT - 2 * ROOT) * 7 / 8
    assert sent(answer, "reduce_scatter gradients") == 4 * EIGHT * 7 / 8
    more = (2 * EIGHT - 2 * ROOT) * 7 / 8
    assert more == pytest.approx(12.2e9, rel=5e-3)


def logits(answer: Answer) -> None:
    assert term(answer, "logits") == 8_192 * VOCABULARY * 12 + 8_192 * WIDTH * 8


def block_inputs(answer: Answer) -> None:
    assert term(answer, "activations") == LAYERS * 8_192 * WIDTH * 2


def moments(answer: Answer) -> None:
    assert term(answer, "moments") == pytest.approx(EIGHT * (2 + 2 * 4 / 256) / 8, rel=1e-6)


def host(answer: Answer) -> None:
    by_hand = {"gradients": 4, "master": 4, "moments": 8}
    assert {name: term(answer, name, "host") for name in by_hand} == {
        name: SEVENTY * count / 8 for name, count in by_hand.items()
    }
    processes = 8 * 0.33  # GiB
    assert answer["memory"]["hosts"][0]["expected_gib"] == pytest.approx(16 * SEVENTY / 2**30 + processes, rel=1e-3)


def cost(answer: Answer) -> None:
    flops = 6 * (EIGHT - VOCABULARY * WIDTH) + 12 * LAYERS * WIDTH * 8_192
    rate = answer["time"]["mfu"] * 989.4e12 / flops
    assert answer["time"]["tokens_per_s_per_gpu"] == pytest.approx(rate, rel=1e-3)
    assert answer["time"]["cost_per_million_tokens"] == pytest.approx(1e6 / rate / 3600 * 2.5, rel=1e-3)


def bubble(answer: Answer) -> None:
    """The third stage works without a pause from its first backward on; the first waits for it, and ends last."""
    layer = 2 * 218.1e6 + 2 * 4096 * 4096  # FLOPs of a token in forward, then again, then twice that in backward
    head = 2 * 525.3e6 / layer  # in forwards of a layer; not again
    forwards, backwards = [8, 9, 9, 6 + head], [24, 27, 27, 18 + 2 * head]
    ranks = PipelineStep(
        build_setup(Request("llama3-8b", 32, strategy="zero1", checkpointing="full", **FOUR_STAGES))
    ).ranks
    for rank, *by_hand in zip(ranks, forwards, backwards, strict=True):
        (stage,), (unit,) = rank.passes, ranks[2].passes
        assert stage.both / unit.both == pytest.approx(sum(by_hand) / 36, rel=0.025)
    before = sum(forwards) + backwards[3]
    played = before + 16 * backwards[2] + 14 * forwards[2] + backwards[1] + backwards[0]
    share = 1 - 16 * (forwards[0] + backwards[0]) / played
    assert share == pytest.approx(0.231, abs=5e-4)
    assert answer["time"]["terms"]["pipeline bubble"] / answer["time"]["step_s"] == pytest.approx(share, rel=0.02)


def between_hosts(answer: Answer) -> None:
    assert answer["traffic"]["links_gb"]["internode"] * 1e9 == 2 * 7 / 8 * 4 * EIGHT / 8


CHECKS: list[Callable[[Answer], None]] = [
    states_of_eight,
    fewest,
    gathered_again,
    logits,
    block_inputs,
    moments,
    host,
    cost,
    bubble,
    between_hosts,
]


@pytest.mark.parametrize(("command", "check"), [*zip(COMMANDS, CHECKS, strict=True)])
def test_a_question_is_answered_as_by_hand(command: str, check: Callable[[Answer], None]) -> None:
    done = CliRunner().invoke(cli.app, [*shlex.split(command), "--json"])
    assert done.exit_code == 0, done.output
    check(json.loads(done.stdout))
