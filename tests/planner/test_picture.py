"""Pictures of memory: lengths are to scale, the capacity is where it belongs, and all three forms agree."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from terrazzo.errors import BadInput
from terrazzo.planner.assemble import estimate
from terrazzo.planner.report.alternatives import alternatives
from terrazzo.planner.report.bars import KINDS, Chart, MemoryBar, chart_of, kind_of
from terrazzo.planner.report.blocks import TableColumn, TextLine, TextTable, plain, show
from terrazzo.planner.report.picture import SCALE, save_picture, svg
from terrazzo.planner.report.terminal import show_bars
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.request import Request

GIB = 2.0**30
SVG = "{http://www.w3.org/2000/svg}"


def chart(capacity: float | None = 80, longest: float = 60) -> Chart:
    bars = (
        MemoryBar("zero0", {"weights": longest * GIB / 2, "optimizer": longest * GIB / 2}),
        MemoryBar("zero3", {"weights": 10 * GIB, "activations": 20 * GIB}, upper=40 * GIB, chosen=True),
    )
    return Chart("a <model> & more", "8 × tokens", bars, None if capacity is None else capacity * GIB)


def boxes(picture: str) -> dict[str, list[tuple[float, float]]]:
    """Start and width of the segments, by kind."""
    found: dict[str, list[tuple[float, float]]] = {}
    for box in ET.fromstring(picture).iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text:
            found.setdefault(title.text.partition(":")[0], []).append(
                (float(box.attrib["x"]), float(box.attrib["width"]))
            )
    return found


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(picture).iter(f"{SVG}text")]


def test_segments_are_to_scale_and_follow_each_other() -> None:
    found = boxes(svg(chart()))
    (zero0, zero3), (optimizer,), (activations,) = found["weights"], found["optimizer"], found["activations"]
    assert zero0[1] == pytest.approx(3 * zero3[1], abs=0.02)
    assert optimizer[0] == pytest.approx(zero0[0] + zero0[1], abs=0.02)
    assert activations[0] == pytest.approx(zero3[0] + zero3[1], abs=0.02)
    assert zero0[0] == zero3[0]


def test_the_capacity_line_stands_at_the_capacity() -> None:
    picture = svg(chart(capacity=45))
    dashed = [line for line in ET.fromstring(picture).iter(f"{SVG}line") if "stroke-dasharray" in line.attrib]
    start, width = boxes(picture)["weights"][0]  # 30 GiB
    assert len(dashed) == 1
    assert float(dashed[0].attrib["x1"]) == pytest.approx(start + width * 45 / 30, abs=0.05)
    assert "memory of the device: 45.0 GiB" in texts(picture)


def test_a_bar_far_beyond_the_capacity_is_cut_and_keeps_its_number() -> None:
    picture = svg(chart(capacity=20, longest=2000))
    found = boxes(picture)
    assert found["weights"][0][1] == pytest.approx(
        40 / 10 * found["weights"][1][1], abs=0.05
    )  # cut at twice the capacity
    assert "optimizer" not in found
    assert "2,000.0 GiB" in texts(picture)


def test_without_a_capacity_there_is_no_line() -> None:
    assert "stroke-dasharray" not in svg(chart(capacity=None))
    assert "the device has 500.0 GiB" in texts(svg(chart(capacity=500)))


def test_names_cannot_break_the_document() -> None:
    picture = svg(chart())
    assert "a <model> & more" in texts(picture)
    assert ET.fromstring(picture).attrib["aria-label"] == "a <model> & more"


def test_small_models_are_drawn_in_mib() -> None:
    small = Chart("t", "s", (MemoryBar("zero3", {"weights": 3 * 2.0**20}),), 24 * GIB)
    assert "3.0 MiB" in texts(svg(small))


def test_a_png_has_the_same_colours_and_twice_the_resolution(tmp_path: Path) -> None:
    save_picture(chart(), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or []}
        width = image.width
    assert width == SCALE * float(ET.fromstring(svg(chart())).attrib["width"])
    used = [kind.colour for kind in chart().kinds]
    assert {tuple(bytes.fromhex(colour[1:])) for colour in used} <= colours


@pytest.mark.parametrize("name", ["a.pdf", "a"])
def test_what_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        save_picture(chart(), tmp_path / name)


# -- from estimates ------------------------------------------------------------------------------------------------


def test_a_chart_of_estimates_adds_up_and_marks_the_chosen_plan() -> None:
    chosen = estimate(build_setup(Request("llama3-8b", gpus=16, gpu="h100-sxm", strategy="hpz")))
    drawn = chart_of(alternatives(chosen, estimate), chosen)
    assert [bar.label for bar in drawn.bars if bar.chosen] == ["hpz"]
    assert {"zero0", "zero3", "hybrid_shard"} <= {bar.label for bar in drawn.bars}
    (bar,) = (bar for bar in drawn.bars if bar.chosen)
    assert bar.total == pytest.approx(chosen.memory.expected_bytes)
    assert bar.upper == chosen.memory.most_bytes
    assert drawn.capacity == chosen.memory.capacity_bytes


def test_every_term_of_memory_is_of_some_kind() -> None:
    offloaded = Request("mixtral-8x7b", gpus=16, gpu="h100-sxm", strategy="zero3@cpu", checkpointing="full")
    for request in (Request("llama3-8b", gpus=8, gpu="h100-sxm", strategy="zero2", micro_batches=2), offloaded):
        for term in estimate(build_setup(request)).memory.terms:
            assert kind_of(term.name).name != "other", term.name


def test_impossible_strategies_are_left_out_and_offload_is_added() -> None:
    chosen = estimate(build_setup(Request("gpt2", gpus=8, gpu="h100-sxm", strategy="zero3@cpu")))
    names = [found.setup.plan.name for found in alternatives(chosen, estimate)]
    assert "hybrid_shard" not in names  # one host
    assert names[-1] == "zero3@cpu"


def test_groups_of_one_rank_are_no_bar() -> None:
    """Where tp fills a host, strategies in groups would be drawn as one that splits nothing."""
    chosen = estimate(build_setup(Request("llama3-8b", gpus=32, gpu="h100-sxm", strategy="zero3", tp=8)))
    assert {found.setup.mesh.shard_ranks for found in alternatives(chosen, estimate)} == {4}


def test_another_name_of_a_plan_draws_no_second_bar() -> None:
    chosen = estimate(build_setup(Request("llama3-8b", gpus=8, gpu="h100-sxm", strategy="ddp")))
    names = [found.setup.plan.name for found in alternatives(chosen, estimate)]
    assert names == ["ddp", "zero1", "zero2", "zero3", "shard_grad_op"]


# -- on a terminal -------------------------------------------------------------------------------------------------


def printed(width: int, *, terminal: bool, shown: Chart | None = None) -> list[str]:
    output = io.StringIO()
    system = "truecolor" if terminal else None
    console = Console(file=output, width=width, force_terminal=terminal, color_system=system, legacy_windows=False)
    show_bars(shown or chart(capacity=45), console)
    return output.getvalue().splitlines()


def test_letters_stand_for_kinds_where_there_are_no_colours() -> None:
    lines = printed(100, terminal=False)
    zero0, zero3 = (next(line for line in lines if name in line) for name in ("zero0", "zero3"))
    assert zero0.count("w") == zero0.count("s") == 22  # halves of 44 characters
    assert zero3.startswith("> ")
    assert zero3.count("w") == 7  # 10 of 60 GiB
    assert zero3.count("a") == 15
    assert "\x1b" not in "".join(lines)
    assert {line.index("|") for line in (zero0, zero3)} == {zero0.index("|")}


def test_a_coloured_terminal_gets_blocks_in_the_colours_of_the_picture() -> None:
    text = "\n".join(printed(100, terminal=True))
    assert "█" in text
    red, green, blue = bytes.fromhex(KINDS[0].colour[1:])
    assert f"38;2;{red};{green};{blue}" in text


@pytest.mark.parametrize("width", [40, 60, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for line in printed(width, terminal=True):
        assert len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width


def test_a_cut_bar_says_so() -> None:
    lines = printed(100, terminal=False, shown=chart(capacity=20, longest=2000))
    assert ">   2,000.0 GiB" in next(line for line in lines if "zero0" in line)


# -- tables --------------------------------------------------------------------------------------------------------

TABLE = TextTable(
    (TableColumn("name"), TableColumn("GiB", "right", 5), TableColumn("formula", keep=1)),
    (("weights", "1.00", "memory.weights"),),
)


def test_a_narrow_terminal_loses_the_least_important_columns_first() -> None:
    narrow, left_out = TABLE.within(20)
    assert [column.heading for column in narrow.columns] == ["name", "GiB"]
    assert left_out == []  # the formula goes without a word
    narrowest, left_out = TABLE.within(8)
    assert [column.heading for column in narrowest.columns] == ["name"]
    assert left_out == ["GiB"]


def test_plain_tables_are_aligned() -> None:
    heading, rule, row = plain([TABLE]).strip().splitlines()
    assert heading.index("GiB") + 3 == row.index("1.00") + 4
    assert set(rule) == {"-", " "}


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert "\x1b" not in plain([TextLine("\x1b[31mred")])
    output = io.StringIO()
    show([TextLine("\x1b]0;title\x07")], Console(file=output, force_terminal=True, color_system=None))
    assert "\x07" not in output.getvalue()


def test_a_bar_is_what_a_plan_of_that_name_takes() -> None:
    """Of several micro-batches too, whose gradients zero1 adds up whole, and zero2 does not."""
    asked = {"gpus": 8, "gpu": "h100", "micro_batches": 4}
    chosen = estimate(build_setup(Request("llama3-8b", strategy="zero1", **asked)))
    bars = {each.setup.plan.name: each.memory.allocated_bytes for each in alternatives(chosen, estimate)}
    for name in ("zero2", "zero3"):
        assert bars[name] == estimate(build_setup(Request("llama3-8b", strategy=name, **asked))).memory.allocated_bytes
