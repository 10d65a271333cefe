"""Writes what the planner's pages repeat from elsewhere: formulas, accuracy, fields of the JSON, output of commands.

python -m tools.planner_page
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from terrazzo import cli
from terrazzo.planner import Request, ask
from terrazzo.planner.report import schema
from terrazzo.planner.report.all_formulas import FORMULAS
from terrazzo.planner.report.bars import chart_of
from terrazzo.planner.report.picture import save_picture

MODELS = (
    "PlanReport", "SetupReport", "MemoryReport", "RoomReport", "TimeReport", "TrafficReport", "CollectiveReport",
    "TermReport", "FindingReport", "FrontierRow", "EditRow", "RefusedRow", "SizingReport", "SizingRow", "StatesReport",
    "StatesRow", "PerRank", "ExplainedReport", "ExplainedTerm",
)  # fmt: skip
"""In the order of the page."""

PICTURE = ("plan", "--model", "llama3-70b", "--gpu", "h100-sxm", "--min-gpus", "--picture")

FEW = ("zero0", "zero1", "zero3", "zero3@cpu")
"""What README's picture compares."""

PARTS = ("memory", "traffic", "time")

PLAIN = {"str": "string", "float": "number", "int": "whole number", "bool": "true or false", "None": "null"}

ROOT = Path(__file__).parents[1]
PLANNER, JSON = ROOT / "docs" / "planner.md", ROOT / "docs" / "reference" / "plan-json.md"
DRAWN, DRAWN_FEW = ROOT / "docs" / "guides" / "memory.svg", ROOT / "docs" / "memory.svg"
GUIDES = ROOT / "docs" / "guides"
PAGES = (PLANNER, JSON, GUIDES / "planning.md", GUIDES / "offload.md", ROOT / "README.md")
ACCURACY = ROOT / "benchmarks" / "planner" / "results" / "accuracy.md"


def formulas() -> str:
    """Every formula that a term of an estimate can have, as a table for each part of the estimate."""
    tables = []
    for part in PARTS:
        keys = sorted(key for key in FORMULAS if key.partition(".")[0] == part)
        rows = [f"| `{key}` | {_cell(FORMULAS[key].text)} | {_cell(FORMULAS[key].source)} |" for key in keys]
        tables.append("\n".join([f"### Formulas of {part}", "", "| key | formula | source |", "|---|---|---|", *rows]))
    return "\n\n".join(tables)


def fields() -> str:
    """Every model of the JSON with its fields."""
    tables = []
    for name in MODELS:
        model: type[BaseModel] = getattr(schema, name)
        head = [f"### {name}", "", (model.__doc__ or "").strip(), "", "| field | type | |", "|---|---|---|"]
        rows = [
            f"| `{key}` | {_type(field)} | {_cell(field.description or '')} |"
            for key, field in model.model_fields.items()
        ]
        tables.append("\n".join(head + rows))
    return "\n\n".join(tables)


def update(page: str) -> str:
    """`page` with what stands between its marks made anew."""
    makers = {"formulas": formulas, "accuracy": lambda: ACCURACY.read_text(encoding="utf-8").strip(), "fields": fields}
    for name, make in makers.items():
        begin, end = f"<!-- {name}: python -m tools.planner_page -->", f"<!-- end of {name} -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            page = f"{before}{begin}\n\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return re.sub(r"```console\n\$ (terrazzo plan [^\n]+)\n```\n\n```text\n(.*?)```", _example, page, flags=re.DOTALL)


def _example(match: re.Match[str]) -> str:
    """A command and as many lines of what it prints as the page shows; a last line `...` says that there are more."""
    command, shown = match[1], match[2].splitlines()
    printed = output_of(shlex.split(command)[1:])
    more = shown[-1:] == ["..."]
    lines = printed[: len(shown) - more] + ["..."] * more
    return "\n".join([f"```console\n$ {command}\n```\n\n```text", *lines, "```"])


def draw_few(path: Path) -> None:
    """README's picture: one model on one machine under four plans."""
    estimates = [
        ask(Request("llama3-8b", 8, "h100-sxm", strategy, micro_batch=2, sequence=4096, checkpointing="full")).best
        for strategy in FEW
    ]
    save_picture(chart_of(estimates, estimates[FEW.index("zero3")]), path)


def output_of(arguments: list[str]) -> list[str]:
    """Lines that `terrazzo` prints, as in a pipe."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        typer.main.get_command(cli.app).main(arguments, standalone_mode=False)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def _type(field: FieldInfo) -> str:
    """`list of TermReport`, `number or null`."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", str(field.annotation))
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace(", ...", "").replace("'", "")
    text = re.sub(r"tuple\[(\w+)\]", r"list of \1", text)
    text = re.sub(r"Mapping\[str, (\w+)\]", r"object of \1", text)
    text = re.sub(r"Literal\[(.+)\]", lambda match: match[1].replace(", ", " or "), text)
    for python, plain in PLAIN.items():
        text = re.sub(rf"\b{python}\b", plain, text)
    return text.replace(" | ", " or ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    output_of([*PICTURE, str(DRAWN)])
    draw_few(DRAWN_FEW)
    for page in PAGES:
        page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
