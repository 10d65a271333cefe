"""The planner's pages repeat formulas, accuracy, fields and output exactly as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from terrazzo.planner.report.schema import StatesReport
from tools import planner_page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", planner_page.PAGES, ids=lambda page: page.stem)
def test_the_pages_are_up_to_date(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no records of this machine
    text = page.read_text(encoding="utf-8")
    assert planner_page.update(text) == text, "python -m tools.planner_page"


def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    planner_page.output_of([*planner_page.PICTURE, str(tmp_path / "memory.svg")])
    planner_page.draw_few(tmp_path / "few.svg")
    for new, drawn in (("memory.svg", planner_page.DRAWN), ("few.svg", planner_page.DRAWN_FEW)):
        written = [re.findall(r">([^<]+)</t", path.read_text()) for path in (tmp_path / new, drawn)]
        assert written[0] == written[1], "python -m tools.planner_page"


def test_every_formula_has_a_text_and_a_source() -> None:
    rows = [line for line in planner_page.formulas().splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for row in rows:
        key, text, source = (cell.strip() for cell in row.strip("| ").split(" | "))
        assert re.fullmatch(r"`(memory|traffic|time)\.\w+`", key)
        assert len(text) > 10
        assert len(source) > 5


def test_constants_that_the_page_names_exist() -> None:
    rests_on = planner_page.PLANNER.read_text(encoding="utf-8").partition("### What these tables rest on")[2]
    named = set(re.findall(r"`([A-Z_]{4,})`", rests_on))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/terrazzo/planner").rglob("*.py"))
    assert len(named) > 10
    assert {name for name in named if not re.search(rf"^(?:\w+, )*{name}\b.* = ", sources, re.MULTILINE)} == set()


def test_every_model_of_the_json_is_on_the_page() -> None:
    from terrazzo.planner.report import schema

    assert set(schema.__all__) == set(planner_page.MODELS)


def test_the_example_is_valid() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", planner_page.JSON.read_text(encoding="utf-8"), re.DOTALL)
    assert StatesReport.model_validate(json.loads(example)).plans[0].per_rank.states_gb == 4.375
