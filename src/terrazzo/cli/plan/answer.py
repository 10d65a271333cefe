"""Carries out `terrazzo plan`: finds the answer, writes files, prints."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from terrazzo.cli.plan.files import check_files, emit, files_of, missing_parts
from terrazzo.cli.plan.options import OPTION_ROWS, PlanArguments
from terrazzo.cli.plan.sources import FromConfig, FromCount, FromModel, PlanSource
from terrazzo.cli.plan.values import by_option, check_tier
from terrazzo.cli.shared.written_files import write_output, writing
from terrazzo.config import Config
from terrazzo.dialects.registry import NAMES, dialect
from terrazzo.errors import BadInput
from terrazzo.messages import nearest
from terrazzo.planner import Cluster, Estimate, Framework, Request, runnable
from terrazzo.planner.api import ask, compare, in_framework
from terrazzo.planner.model.loading import preset_name
from terrazzo.planner.model.presets import PRESETS
from terrazzo.planner.report.answer import Answer
from terrazzo.planner.report.bare import BareAnswer
from terrazzo.planner.report.blocks import TextBlock, TextLine, show
from terrazzo.planner.report.explain import explain, explained
from terrazzo.planner.report.page import page
from terrazzo.planner.report.terminal import show_bars
from terrazzo.planner.setup.build_setup import build_cluster
from terrazzo.planner.setup.framework import TERRAZZO
from terrazzo.shell_command import terrazzo_command

__all__ = ["answer_plan"]


def answer_plan(arguments: PlanArguments) -> None:
    """Answer, write the files that were asked for, and print."""
    check_files(arguments.emit, arguments.picture, arguments.html)
    source = _source(arguments)
    _refuse_options(source, arguments)
    answer = _answer(source, arguments)
    explanation = None if arguments.explain is None else explained(_best(answer), arguments.explain)
    _write(answer, source, arguments)
    if arguments.json:
        print((explanation or answer.report()).model_dump_json(indent=2))
    elif explanation is not None:
        show(explain(explanation))
    else:
        _print(answer, source, arguments)


# -- the answer ----------------------------------------------------------------------------------------------------


def _answer(source: PlanSource, arguments: PlanArguments) -> Answer | BareAnswer:
    framework = Framework.parse(arguments.framework)
    if isinstance(source, FromModel):
        return _of_model(arguments)
    if isinstance(source, FromCount):
        return _of_count(source.text, arguments)
    from terrazzo.cli.plan.plan_config import plan_config  # imports the trainer

    answer = plan_config(source, arguments, _request(arguments, model=1))
    return answer if framework == TERRAZZO else in_framework(answer, framework)


def _of_model(arguments: PlanArguments) -> Answer:
    request = _model_request(arguments)
    return ask(request, fewest=arguments.min_gpus or (request.gpus is None and request.strategy is None))


def _model_request(arguments: PlanArguments) -> Request:
    return replace(_request(arguments), framework=arguments.framework)


def _of_count(text: str, arguments: PlanArguments) -> BareAnswer:
    """States and traffic of a bare number of parameters; by default with the ZeRO paper's 2 + 2 + 12 bytes each."""
    if "@" in (arguments.strategy or ""):
        raise BadInput("An offload says nothing about a bare number of parameters: name a model with --model.")
    precision = "zero" if arguments.precision is None else arguments.precision
    request = _request(arguments, model=_count(text), precision=precision)
    if not isinstance(request.gpus, int):
        number = "none was given" if request.gpus is None else f"--gpus is {request.gpus!r}"
        raise BadInput(f"--params needs one number of ranks, and {number}: write --world 256.")
    machine = request.gpu is not None or request.memory_bytes is not None
    return BareAnswer(request, build_cluster(request).device.memory_bytes if machine else None)


def _request(arguments: PlanArguments, **changes: Any) -> Request:
    """The request to the planner; `changes` replace fields of it."""
    strategy, offload = _strategy(arguments.strategy, arguments.offload)
    own = {"strategy": strategy, "offload": offload, "sequence_parallel": not arguments.no_sequence_parallel}
    try:
        return Request(**{**arguments.request_fields, **own, **changes})
    except BadInput as error:
        raise BadInput(by_option(str(error))) from None


def _strategy(name: str | None, tier: str | None) -> tuple[str | None, bool]:
    """The strategy, with its tier if one was given, and whether the search may choose a tier."""
    if tier is not None:
        check_tier(tier)
    if tier == "any" and name is not None:
        raise BadInput(
            f"--offload any leaves the strategy open, and --strategy {name} is given: name a tier, such as cpu."
        )
    if tier is None or tier == "any":
        return name, tier == "any"
    if name is not None and "@" in name:
        raise BadInput(f"--strategy {name} names a tier, and --offload {tier} too: leave one of the two out.")
    if name is None:
        raise BadInput(
            f"--offload {tier} needs the strategy that it belongs to (--strategy zero3), or be --offload any."
        )
    return f"{name}@{tier}", False


COUNT = re.compile(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", re.IGNORECASE)
MOST_PARAMS = 1e18
LETTERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _count(text: str) -> float:
    """The number that a text such as `70e9`, `70B` or `1.5t` stands for."""
    match = COUNT.fullmatch(text.replace(",", "").replace("_", ""))
    try:
        value = float(match[1]) * LETTERS[match[2].lower()] if match else math.nan
    except ValueError:
        value = math.nan
    if not 1 <= value <= MOST_PARAMS:
        raise BadInput(
            f"--params is '{text[:40]}', expected a number of parameters such as 70e9, 70B or 350M, of at most"
            f" {MOST_PARAMS:.0e}."
        )
    return round(value)


# -- refusals ------------------------------------------------------------------------------------------------------


def _source(arguments: PlanArguments) -> PlanSource:
    """What describes the model; raises `BadInput` unless exactly one thing does."""
    sources: list[PlanSource] = []
    if arguments.config is not None:
        sources.append(FromConfig(arguments.config, arguments.overrides))
    if arguments.model is not None:
        sources.append(FromModel(arguments.model))
    if arguments.params is not None:
        sources.append(FromCount(arguments.params))
    if len(sources) != 1:
        problem = " and ".join(each.label for each in sources) + " were given" if sources else "No model was given"
        raise BadInput(f"{problem}: give CONFIG, --model NAME or --params COUNT, and only one of them.")
    _check_config(arguments.config)
    return sources[0]


def _check_config(path: Path | None) -> None:
    """Raise `BadInput` if CONFIG is the name of a model and not a file."""
    if path is None or path.suffix or path.exists():
        return
    meant = str(path) if preset_name(str(path)) else nearest(str(path), PRESETS)
    if meant:
        raise BadInput(f"There is no file '{path}', and a model is named by an option: write --model {meant}.")


def _refuse_options(source: PlanSource, arguments: PlanArguments) -> None:
    """Raise `BadInput` for options that have no meaning with a configuration or with a bare number of parameters."""
    reasons = {
        "CONFIG": "was given beside a configuration, which decides it: write an override, such as plan.name=zero2.",
        "--params": "says nothing about a bare number of parameters: name a model with --model.",
    }
    for option in OPTION_ROWS if source.label in reasons else ():
        if option.argument in arguments.written and source.label not in option.beside:
            raise BadInput(f"{option.flag} {reasons[source.label]}")
    if arguments.calibrate and (not isinstance(source, FromConfig) or arguments.gpu is not None):
        raise BadInput(
            "--calibrate measures a configuration of `terrazzo train` on this machine: give CONFIG, no --gpu."
        )
    if arguments.emit is not None and not isinstance(source, FromModel):
        raise BadInput("--emit writes the configuration of a model that is planned with --model.")
    if arguments.html is not None and not isinstance(source, FromModel):
        why = "which a configuration decides" if isinstance(source, FromConfig) else "of which a number says nothing"
        raise BadInput(
            f"--html draws other strategies, micro-batches, sequences and checkpointing, {why}: give a model by "
            "--model, such as a preset or the folder of its config.json."
        )


# -- the outputs ---------------------------------------------------------------------------------------------------


def _write(answer: Answer | BareAnswer, source: PlanSource, arguments: PlanArguments) -> None:
    if arguments.emit is not None and isinstance(source, FromModel):
        emit(_best(answer), source.name, arguments.emit)
    if arguments.picture is not None:
        from terrazzo.planner.report.picture import save_picture  # imports Pillow

        with writing(arguments.picture):
            save_picture(answer.chart(), arguments.picture)
    if arguments.html is not None and isinstance(answer, Answer):
        write_output(arguments.html, _page(answer, arguments))


def _page(answer: Answer, arguments: PlanArguments) -> str:
    """The page of all possible plans, also if one plan was named."""
    request, frontier = _model_request(arguments), answer.frontier
    if frontier is None:
        opened = replace(request, strategy=None, micro_batch=None, checkpointing=None)
        frontier = compare(opened)
    return page(answer.best, request, frontier, answer.estimate)


def _print(answer: Answer | BareAnswer, source: PlanSource, arguments: PlanArguments) -> None:
    console = Console(highlight=False)
    show(answer.blocks(), console)
    show_bars(answer.chart(), console)
    if isinstance(answer, Answer):
        show(_how_to_run(answer, source, arguments), console)


def _how_to_run(answer: Answer, source: PlanSource, arguments: PlanArguments) -> list[TextBlock]:
    """The commands that run the plan, if this version can; of another framework's plan those that write it for that."""
    here = answer.best.memory.fits is not False and runnable(answer.best.setup)
    cluster, framework = answer.best.setup.cluster, answer.best.setup.framework.name
    elsewhere = framework != TERRAZZO.name and framework in NAMES
    if isinstance(source, FromConfig):
        if not here:
            return []
        if elsewhere:
            return [] if source.overrides else _written_for(framework, source.path, cluster)
        ranks = _ranks(answer, arguments.gpus, source.config)
        command = shlex.join(["train", str(source.path), *source.overrides, *ranks])
        return _start(cluster, command)
    if not isinstance(source, FromModel) or not (here or arguments.emit):
        return []
    path = arguments.emit or Path("plan.yaml")
    try:
        left = missing_parts(files_of(answer.best, source.name, path))
    except BadInput:  # a model that `terrazzo train` cannot build
        return []
    emitting = shlex.join(["plan", *arguments.question, "--emit", str(path)])
    said, first = (f"written: {path}. ", "") if arguments.emit else ("", f"{terrazzo_command()} {emitting} && ")
    if elsewhere:
        return _written_for(framework, path, cluster, said=said, first=first)
    train = " ".join([f"train {shlex.quote(str(path))}", *(f"{key}=..." for key in left)])
    return _start(cluster, train, said=said, first=first)


def _ranks(answer: Answer, gpus: str | None, config: Config) -> list[str]:
    """The override for the number of ranks that was planned, if one host has them and `config` has another number."""
    cluster, configured = answer.best.setup.cluster, config.rank_numbers[-1:]
    if gpus is None or list(configured) == [cluster.count] or cluster.nodes > 1:
        return []
    return [f"launch.ranks={cluster.count}"]


def _start(cluster: Cluster, train: str, *, said: str = "", first: str = "") -> list[TextBlock]:
    """The commands that start `train` on all ranks: torchrun if there are several hosts, which starts on each as many
    as it is told there, so that a last host with fewer ranks has a command of its own.

    Args:
        said, first: what comes before, as text, and in the first command.
    """
    each, last = cluster.ranks_per_host, cluster.ranks_of_last_host
    if cluster.nodes == 1:
        return [TextLine(f"\n{said}To run it: {first}{terrazzo_command()} {train}", copied=True)]
    if each == last:
        return [TextLine(f"\n{said}To run it: {first}{_torchrun(cluster, each)} {train}", copied=True)]
    return [
        TextLine(f"\n{said}To run it, on each full host: {first}{_torchrun(cluster, each)} {train}", copied=True),
        TextLine(f"And on the last host, with the other {last}: {_torchrun(cluster, last)} {train}", copied=True),
    ]


def _written_for(framework: str, path: Path, cluster: Cluster, *, said: str = "", first: str = "") -> list[TextBlock]:
    """The command that writes a plan in the words of the framework whose plan it is; `said`, `first` as `_start`."""
    command = shlex.join(["config", "convert", str(path), "--to", framework, "--world", str(cluster.count)])
    what = f"To have it in {dialect(framework).title}, and what your own code says besides"
    return [TextLine(f"\n{said}{what}: {first}{terrazzo_command()} {command}", copied=True)]


def _torchrun(cluster: Cluster, ranks: int) -> str:
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {cluster.nodes} --nproc-per-node {ranks} {meeting} -m terrazzo"


def _best(answer: Answer | BareAnswer) -> Estimate:
    assert isinstance(answer, Answer), "options that need a model are refused without one"
    return answer.best
