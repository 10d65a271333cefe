"""`terrazzo bench`: Terrazzo timed beside FSDP2, DeepSpeed and others, by the benchmarks of a checkout."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from terrazzo.cli.shared.written_files import make_writable_folder
from terrazzo.errors import BadInput

__all__ = ["bench"]


def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="cpu (default; 25 minutes on two cores), axes, stages, mixture or timeline (5 minutes), or tiny to try"
            " it out"
        ),
    ] = "cpu",
    cases: Annotated[
        str, typer.Option(help="comma-separated: only these cases of the suite, of timeline these layouts")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="folder for report.md, record.json and step-times.png; default: benchmarks/out")
    ] = Path("benchmarks/out"),
    as_json: Annotated[bool, typer.Option("--json", help="print the record and not the report")] = False,
) -> None:
    """Time Terrazzo beside DDP, ZeroRedundancyOptimizer, FSDP1, FSDP2 and DeepSpeed on this machine.

    Contenders take turns in one run on the same model, seed and data; nothing is reported unless their losses agree.
    Runs in a checkout of the project, whose folder `benchmarks` holds the cases. A peer that is not installed is left
    out. The suite axes compares tensor parallelism with DTensor's over FSDP2, and context parallelism with Ulysses in
    DeepSpeed; the suite stages pipelines with torch's, alone and over FSDP2, and with DeepSpeed's; the suite mixture a
    Mixtral whose experts ranks share with transformers' own plan over FSDP2. The suite timeline compares virtual times
    of FSDP2 and of plans on a simulated GPU.
    """
    suites = _suites()
    if suite not in suites:
        raise BadInput(f"--suite is {suite!r}; there are: {', '.join(suites)}.")
    module = suites[suite]
    known = module.cases(suite)
    chosen = cases.split(",") if cases else known
    if unknown := [name for name in chosen if name not in known]:
        raise BadInput(f"--cases has {', '.join(unknown)}; suite {suite} has: {', '.join(known)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("The plot of a report needs matplotlib. The extra 'bench' has it (make bench installs it).")
    make_writable_folder(out)
    record = module.run_suite(suite, chosen, shlex.join(["terrazzo", *sys.argv[1:]]))
    module.write(record, out)
    print(json.dumps(record) if as_json else module.markdown(record))


def _suites() -> dict[str, Any]:
    """The module of each suite, from the checkout in the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        modules = [importlib.import_module(name) for name in ("benchmarks.cpu.suite", "benchmarks.timeline.suite")]
        return {suite: module for module in modules for suite in module.SUITES}
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("benchmarks"):
            raise
        raise BadInput(
            f"There are no benchmarks in {Path.cwd()}. 'terrazzo bench' runs in the root of a checkout of the project, "
            "with the packages of the extra 'bench' (make bench installs them)."
        ) from None
