"""The documentation says what is: every key, option and name is in it, every link leads somewhere, every block runs.

A code block of kind `python runnable` runs on one rank, one of kind `python two-ranks` on two gloo processes; the
blocks of a page share their names. The first on two ranks starts the group, which here is there already. Where a `text`
block follows, it is exactly what the block prints, rank by rank.
"""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo import checkpoint, cli, engine, exit_codes, planner
from terrazzo.checkpoint.format.manifest import Extent, File, Manifest, OptimizerState, State, Tensor, Tile, Topology
from terrazzo.engine import PLANS, PRECISIONS, Plan
from terrazzo.engine.plan.place import ROWS
from terrazzo.words import DTYPE_FIELDS
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool
from tools import reference_pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])


STARTS = r"^dist\.init_process_group\(\)$"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass
class Block:
    """A fenced block of kind `kind`, and what the `text` block right behind it holds, if there is one."""

    kind: str
    code: str
    prints: str | None


def blocks_of(page: Path) -> list[Block]:
    fences = r"^```([^\n]+)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?"
    found = re.finditer(fences, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(*match.groups()) for match in found]


def with_kind(kind: str) -> list[Path]:
    return [page for page in PAGES if any(block.kind == kind for block in blocks_of(page))]


def printed_by(blocks: list[str], folder: Path) -> list[str]:
    """What each of a page's blocks prints, run in `folder` one after the other with shared names."""
    names: dict[str, Any] = {"__name__": "documentation"}
    outputs = []
    for code in blocks:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(io.StringIO()) as output,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "tz.Precision: .* changes nothing")  # on the one rank that it runs on
            exec(compile(code, "<documentation>", "exec"), names)
        outputs.append(output.getvalue())
    return outputs


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", with_kind("python runnable"), ids=page_id)
def test_blocks_run_on_one_rank(page: Path, one_rank: None, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.kind == "python runnable"]
    for block, output in zip(blocks, printed_by([block.code for block in blocks], tmp_path), strict=True):
        if block.prints is not None:
            assert output == block.prints


@pytest.mark.processes
@pytest.mark.parametrize("page", with_kind("python two-ranks"), ids=page_id)
def test_blocks_run_on_two_ranks(page: Path, two_processes: Pool, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.kind == "python two-ranks"]
    first, *others = (block.code for block in blocks)
    assert re.search(STARTS + r"|\btz\.initialize\(", first, re.MULTILINE), "as printed, a script has no process group"
    by_rank = two_processes.run(printed_by, [re.sub(STARTS, "", first, flags=re.MULTILINE), *others], tmp_path)
    for block, outputs in zip(blocks, zip(*by_rank, strict=True), strict=True):
        if block.prints is not None:
            assert "".join(outputs) == block.prints


def losses_of(script: str, folder: Path, names: dict[str, Any] | None = None) -> list[float]:
    """Of a loop that computes a `loss` in each step, run in `folder` and in a group that is there already."""
    looped = re.sub(r"^( +)loss\.backward\(\)", r"\1losses.append(loss.item())\n\g<0>", script, flags=re.MULTILINE)
    names = {"losses": []} if names is None else names
    with contextlib.chdir(folder):
        exec(compile(looped.replace("dist.init_process_group()", ""), "<diff>", "exec"), names)
    return list(names["losses"])


@pytest.mark.processes
def test_the_diff_on_the_first_screen_keeps_the_losses_and_goes_on(two_processes: Pool, tmp_path: Path) -> None:
    """Started twice, it is the plain loop of two epochs."""
    diff = next(block.code for block in blocks_of(ROOT / "README.md") if block.kind == "diff")
    lines = diff.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != out) for out in "+-")
    whole = losses_of(before.replace("in loader:", "in 2 * list(loader):"), tmp_path)
    parts = [two_processes.run(losses_of, after, tmp_path) for _ in range(2)]
    assert whole[-1] < whole[0]
    found = [sum(both) / 2 for ranks in parts for both in zip(*ranks, strict=True)]
    assert found == pytest.approx(whole, rel=1e-4)


class _Stopped(Exception):
    pass


def losses_until(stop: int, script: str, folder: Path) -> list[float]:
    """`losses_of` a loop that is ended in the middle of step `stop`, from 0, or that ends by itself before it."""
    ended = script.replace("loss.backward()", "loss.backward()\n        if len(losses) > stop: raise Stopped")
    names: dict[str, Any] = {"losses": [], "stop": stop, "Stopped": _Stopped}
    with contextlib.suppress(_Stopped):
        losses_of(ended, folder, names)
    return list(names["losses"])


@pytest.mark.processes
def test_the_loop_of_the_guide_goes_on_in_its_epoch_with_its_learning_rate(two_processes: Pool, tmp_path: Path) -> None:
    """Stopped in its second epoch, right behind an epoch's end, and not at all, after which nothing is left to do."""
    (script,) = (block.code for block in blocks_of(DOCS / "guides/own-loop.md") if block.kind == "python resumable")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    (whole, _), (nothing, _) = (two_processes.run(losses_until, 99, script, tmp_path / "whole") for _ in range(2))
    assert len(set(whole)) == 18
    assert nothing == []
    parts = [two_processes.run(losses_until, stop, script, tmp_path / "parts")[0] for stop in (9, 4, 99)]
    assert [len(part) for part in parts] == [10, 5, 6]
    assert parts[0][:8] + parts[1][:4] + parts[2] == whole


def test_the_number_of_plans_is_that_of_the_table() -> None:
    for page in (ROOT / "README.md", ROOT / "docs/README.md"):
        assert "nine rows" in " ".join(page.read_text().split())
    assert len(ROWS) == 9
    with pytest.raises(
        tz.BadInput, match=r"Plans are zero0 \(or ddp, no_shard\), zero1, zero2, zero3 \(or full_shard\),"
    ):
        Plan.named("zero9")


def test_the_extras_on_the_start_page_are_the_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text("start.md"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(extras)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_and_targets_that_a_page_names_exist(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w/])(?:examples|benchmarks|tests|src/terrazzo|tools)/[\w./-]*\w", content):
        if not name.startswith("benchmarks/out"):
            assert (ROOT / name).exists(), f"{name} does not exist"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", content)) <= set(targets)


def test_whoever_wants_to_change_something_is_told_where_it_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [row.split(" | ") for row in re.findall(r"^\| (.* \| `.*) \|$", text, re.M)]
    named = {"src/terrazzo": set[Path](), "tests": set[Path]()}
    for row in rows:
        for root, cell in zip(named, row[-2:], strict=True):
            named[root] |= {ROOT / root / path for path in re.findall(r"`([\w/.]+)`", cell)}
    assert rows and all(path.exists() for paths in named.values() for path in paths)
    inside = {folder for path in named["src/terrazzo"] for folder in (path, *path.parents)}
    packages = {path.parent for path in (ROOT / "src/terrazzo").rglob("__init__.py")}
    whole = {path for path in named["src/terrazzo"] if path.is_dir()}
    assert {package for package in packages if package not in inside and not whole & set(package.parents)} == set()


def test_every_module_of_the_engine_is_in_its_page() -> None:
    page = (ROOT / "docs/concepts/engine.md").read_text()
    modules = {path.stem for path in (ROOT / "src/terrazzo/engine").rglob("*.py")} - {"__init__"}
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.M)
    assert modules <= {name for row in rows for name in re.findall(r"`(?:\w+/)?(\w+)`", row)}


def test_what_the_planner_writes_twice_is_in_modules_and_held_by_tests_that_are_there() -> None:
    page = text("concepts/planner.md")
    rows = page[page.index("| what | by the engine |") :].split("\n\n")[0].splitlines()[2:]
    for _, by_engine, by_planner, held in ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows):
        for cell, folders in ((by_engine, ("engine", ".")), (by_planner, ("planner",))):
            for module in re.findall(r"`([a-z_/]+)`", cell):
                homes = [ROOT / "src/terrazzo" / folder / module for folder in folders]
                assert any(home.is_dir() or home.with_suffix(".py").exists() for home in homes), module
        for module, tests in re.findall(r"`(test_\w+\.py)`: ((?:`\w+`(?:, )?)+)", held):
            source = (ROOT / "tests/planner" / module).read_text(encoding="utf-8")
            assert all(f"def {name}(" in source for name in re.findall(r"`(\w+)`", tests)), (module, tests)
        assert "`test_" in held


def test_every_page_is_in_the_index() -> None:
    index = text("README.md")
    for page in DOCS.rglob("*.md"):
        assert page == DOCS / "README.md" or f"({page.relative_to(DOCS)})" in index


# -- the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", reference_pages.PAGES, ids=page_id)
def test_the_reference_is_what_the_code_says(page: Path) -> None:
    assert reference_pages.MARK in page.read_text(encoding="utf-8"), "a table written by hand"
    assert reference_pages.update(page.read_text(encoding="utf-8")) == page.read_text(encoding="utf-8"), (
        reference_pages.MARK
    )


def test_every_config_key_and_choice_is_in_the_reference() -> None:
    rows = re.findall(
        r"^\| `([a-z_]+\.[a-z_.]+)` \| `.*?` \| (.*) \|$", text("reference/train-config.md"), re.MULTILINE
    )
    meanings = dict(rows)
    keys = dict(reference_pages.settings())
    assert len(rows) == len(meanings) and set(meanings) == set(keys)
    for key, field in keys.items():
        assert meanings[key], f"{key} has no description"
        for choice in get_args(field.annotation):
            assert not isinstance(choice, str) or f"`{choice}`" in meanings[key], f"{choice} is a choice of {key}"


def test_every_command_line_argument_is_in_the_reference() -> None:
    reference = text("reference/cli.md")
    root: Any = typer.main.get_command(cli.app)
    verbs = {f"terrazzo {name}": verb for name, verb in root.commands.items()}
    for group in [name for name, verb in verbs.items() if hasattr(verb, "commands")]:
        verbs |= {f"{group} {name}": verb for name, verb in verbs.pop(group).commands.items()}
    for name, verb in verbs.items():
        panels = {getattr(parameter, "rich_help_panel", None) or "" for parameter in verb.params}
        shared = "config" if name.startswith("terrazzo config") else name
        for panel in panels:
            where = "terrazzo config explain" if panel and shared == "config" else name
            assert f"<!-- options {where}{', ' if panel else ''}{panel}: " in reference
    for parameter in root.params:
        assert all(f"`{name}`" in reference for name in parameter.opts)


def test_every_public_name_is_in_the_reference() -> None:
    reference = text("reference/api.md")
    for module, prefix in ((tz, "tz."), (checkpoint, "tz.checkpoint."), (engine, ""), (planner, "")):
        for name in set(module.__all__) - {"__version__"}:
            row = rf"^\| .*`(tz\.)?{re.escape(prefix)}{name}[`(]"
            assert re.search(row, reference, re.MULTILINE), f"{prefix}{name}"


def test_every_exit_code_is_in_the_reference() -> None:
    reference = text("reference/exit-codes.md")
    for code, row in exit_codes.EXIT_CODES.items():
        assert f"| {code} | `{row.reason}` | {row.meaning} |" in reference


def test_every_manifest_field_is_in_the_reference() -> None:
    reference = text("reference/checkpoint-format.md")
    for model in (Manifest, File, Topology, Tensor, State, Tile, Extent, OptimizerState):
        assert all(f"`{name}`" in reference for name in model.model_fields)


# -- the table -------------------------------------------------------------------------------------------------


def table_rows(page: Path) -> dict[str, list[str]]:
    """Rows that begin with a plan's name in a table whose next columns are the four places."""
    rows = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = cells[0].split("=")[0].strip().strip("`")
        if name in PLANS and len(cells) > 4 and all(re.fullmatch(r"[-DSR,]+", cell) for cell in cells[1:5]):
            rows[name] = cells
    return rows


def test_the_table_is_the_engines() -> None:
    page = DOCS / "concepts/table.md"
    rows = table_rows(page)
    named = {name: Plan.named(name) for name in PLANS}
    presets = [name for name, plan in named.items() if name in ("zero0", "zero3") or not _is_alias(name, named)]
    assert set(rows) == set(presets)
    for name, cells in rows.items():
        assert cells[1:5] == [str(place) for place in named[name].places().values()]
    assert all(f"`{name}`" in page.read_text(encoding="utf-8") for name in PLANS)


def _is_alias(name: str, named: dict[str, Plan]) -> bool:
    return any(other != name and named[other].places() == named[name].places() for other in named)


@pytest.mark.parametrize("plan", [row for row in PLANS if row in table_rows(DOCS / "concepts/table.md")])
def test_bytes_per_parameter_are_what_the_bill_says(plan: str) -> None:
    lines = text("concepts/table.md").split("## What each row costs")[1].splitlines()
    cells = next(line for line in lines if line.startswith(f"| `{plan}` |")).strip("|").split("|")
    two_axes = "S" in table_rows(DOCS / "concepts/table.md")[plan][4]
    for precision, cell in (("fp32", cells[2]), ("bf16", cells[4])):
        with fake_group(8):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard")) if two_axes else None
            with torch.device("meta"):
                model: Any = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
            model, _ = tz.shard(model, torch.optim.AdamW, plan, mesh=mesh, precision=precision)
            bill = engine.engine_of(model).bill
        assert float(cell) == pytest.approx((bill.total_bytes - bill.transient_bytes) / (2 * 512 * 512), abs=1e-4)


def test_precisions_are_the_engines() -> None:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    for name, precision in PRECISIONS.items():
        dtypes = [short[getattr(precision, field)] for field in DTYPE_FIELDS]
        assert f"| `{name}` | {' | '.join(dtypes)} |" in text("guides/precision.md")
