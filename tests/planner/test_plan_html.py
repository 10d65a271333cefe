"""The page of a plan: one file that loads nothing, and figures that are the planner's own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from terrazzo.messages import GIB
from terrazzo.planner import Estimate, Frontier, Request, build_setup, estimate
from terrazzo.planner.api import ask, compare
from terrazzo.planner.report.page import page

ASKED = Request("llama3.2-1b", 8, gpu="h100", strategy="zero3", sequence=2048, micro_batch=2, price_per_hour=2.5)


@cache
def found() -> Estimate:
    return ask(ASKED).best


@cache
def frontier() -> Frontier:
    return compare(replace(ASKED, strategy=None, micro_batch=None))


@pytest.fixture(scope="module")
def written() -> str:
    return page(found(), ASKED, frontier(), lambda setup: estimate(setup))


def data_of(text: str) -> Any:
    match = re.search(r"const PLAN = (\{.*\});\n", text)
    assert match is not None
    return json.loads(match[1])


def test_it_is_one_file_that_loads_nothing(written: str) -> None:
    assert "/*PLAN*/" not in written
    loads = re.findall(r"<(?:link|img|iframe|script[^>]*src)|@import|url\(|fetch\(|XMLHttpRequest|import\(", written)
    assert not loads
    assert re.findall(r"https?://[^\s\"']+", written) == ["http://www.w3.org/2000/svg"]


def test_every_place_of_the_sliders_is_what_the_planner_says(written: str) -> None:
    data = data_of(written)
    sizes = [len(slider["values"]) for slider in data["sliders"]]
    names = ["micro_batch", "sequence", "checkpointing", "gpus"]
    total = 1
    for size in sizes:
        total *= size
    assert len(data["grid"]) == total
    for index in (0, total // 3, total // 2, total - 1):
        at, rest = [], index
        for size in reversed(sizes):
            rest, place = divmod(rest, size)
            at.append(place)
        values = {
            name: slider["values"][place]
            for name, slider, place in zip(names, data["sliders"], reversed(at), strict=True)
        }
        found = estimate(build_setup(replace(ASKED, **values)))
        shown = data["grid"][index]
        assert shown["gib"] == pytest.approx(found.memory.device_bytes / GIB, rel=1e-4)
        assert sum(shown["parts"]) == pytest.approx(shown["gib"], rel=1e-3)
        assert found.time is not None
        assert shown["speed"] == pytest.approx(found.time.tokens_per_s_per_gpu, rel=1e-4)
        assert shown["gpus"] == values["gpus"]


def test_it_opens_with_the_plan_and_has_every_candidate(written: str) -> None:
    data, index = data_of(written), 0
    for slider in data["sliders"]:
        index = index * len(slider["values"]) + slider["start"]
    assert data["grid"][index]["gib"] == pytest.approx(found().memory.device_bytes / GIB, rel=1e-4)
    assert len(data["plans"]) == len(frontier().ranked)
    assert sum(plan["pareto"] for plan in data["plans"]) == len(frontier().pareto)
    assert data["price"] == 2.5
    assert data["tokens"].startswith("24.7")  # 20 for each of 1.24 B parameters


def test_what_cannot_be_says_why() -> None:
    asked = replace(ASKED, strategy="hybrid_shard", dp_replicate=8)
    data = data_of(page(ask(asked).best, asked, None, lambda setup: estimate(setup)))
    problems = [cell["problem"] for cell in data["grid"] if "problem" in cell]
    assert any("4 data ranks cannot form 8 equal groups" in problem for problem in problems)
    assert any("problem" not in cell for cell in data["grid"])


def test_what_is_known_against_a_place_is_there_too() -> None:
    """All 131,072 positions fit into the plan's sequence, and not into twice as many."""
    asked = replace(ASKED, sequence=131_072, micro_batch=1)
    data = data_of(page(ask(asked).best, asked, None, lambda setup: estimate(setup)))
    (slider,) = (each for each in data["sliders"] if each["name"].startswith("tokens"))
    longer = [index for index, value in enumerate(slider["values"]) if value > 131_072]
    beyond = [number for number, text in enumerate(data["findings"]) if "131072 positions" in text]
    after = [len(each["values"]) for each in data["sliders"][data["sliders"].index(slider) + 1 :]]
    for index, cell in enumerate(data["grid"]):
        at = index // prod(after) % len(slider["values"])
        assert "problem" in cell or bool(set(beyond) & set(cell["findings"])) == (at in longer)


def test_text_of_a_strangers_config_cannot_end_the_script() -> None:
    model = replace(found().setup.model, name="</script><script>alert(1)</script>")
    odd = replace(found(), setup=replace(found().setup, model=model))
    text = page(odd, ASKED, None, lambda setup: estimate(setup))
    assert text.count("</script>") == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_every_place_and_every_plan_is_drawn(written: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(written, encoding="utf-8")
    script = Path(__file__).with_name("page_document.js")
    done = subprocess.run(["node", str(script), str(path)], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(data_of(written)["grid"])
