"""What `terrazzo plan` does with its arguments: find the answer, write files, print."""

from __future__ import annotations

import io
import math
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from terrazzo.cli.plan.files import check_files, emit, emitted, unfilled
from terrazzo.cli.plan.options import OPTIONS
from terrazzo.config import Config, load_config
from terrazzo.errors import BadInput
from terrazzo.planner import Cluster, Estimate, Framework, Request, runnable
from terrazzo.planner.api import ask, compare, in_framework
from terrazzo.planner.model.loading import preset_name
from terrazzo.planner.model.presets import PRESETS
from terrazzo.planner.report.answer import Answer
from terrazzo.planner.report.bare import BareAnswer
from terrazzo.planner.report.explain import explain, explained
from terrazzo.planner.report.page import save_page
from terrazzo.planner.report.picture import save_picture
from terrazzo.planner.report.terminal import show_bars
from terrazzo.planner.setup.request import build_cluster
from terrazzo.planner.text.blocks import TextBlock, TextLine, show
from terrazzo.train.settings.command import program

__all__ = ["run"]

OptionValues = Mapping[str, Any]
"""Arguments of `terrazzo plan` by name."""

_OPTIONS = [option for options in OPTIONS.values() for option in options]


def run(asked: OptionValues, given: Collection[str]) -> None:
    """`terrazzo plan`.

    Args:
        given: names of the arguments that were written, and not left at their defaults.
    """
    check_files(asked["emit"], asked["picture"], asked["html"])
    source = _source(asked)
    _refuse_options(source, asked, given)
    framework = Framework.parse(asked["framework"])
    config = None if source != "CONFIG" else load_config(asked["config"], asked["overrides"] or [])
    answer = _answer(source, asked, framework, config)
    explanation = None if asked["explain"] is None else explained(_best(answer), asked["explain"])
    _write(answer, asked)
    if asked["json"]:
        print((explanation or answer.report()).model_dump_json(indent=2))
    elif explanation is not None:
        show(explain(explanation))
    else:
        _print(answer, asked, config)


# -- the answer ----------------------------------------------------------------------------------------------------


def _answer(source: str, asked: OptionValues, framework: Framework, config: Config | None) -> Answer | BareAnswer:
    if source == "--model":
        return _of_model(asked, framework)
    if config is None:
        return _of_count(asked)
    from terrazzo.cli.plan.of_config import of_config  # imports the trainer

    return in_framework(of_config(config, asked, _request({**asked, "model": 1})), framework)


def _of_model(asked: OptionValues, framework: Framework) -> Answer:
    request = _model_request(asked)
    return ask(request, framework, fewest=asked["min_gpus"] or (request.gpus is None and request.strategy is None))


def _model_request(asked: OptionValues) -> Request:
    return replace(_request(asked), as_megatron=Framework.parse(asked["framework"]).name == "megatron")


def _of_count(asked: OptionValues) -> BareAnswer:
    """States and traffic. The recipe is the ZeRO paper's 2 + 2 + 12 bytes unless another was asked for."""
    if "@" in (asked["strategy"] or ""):
        raise BadInput("An offload says nothing about a bare number of parameters: name a model with --model.")
    precision = "zero" if asked["precision"] is None else asked["precision"]
    request = _request({**asked, "model": _count(asked["params"]), "precision": precision})
    if not isinstance(request.gpus, int):
        given = "none was given" if request.gpus is None else f"--gpus is {request.gpus!r}"
        raise BadInput(f"--params needs one number of ranks, and {given}: write --world 256.")
    machine = request.gpu is not None or request.memory_bytes is not None
    return BareAnswer(request, build_cluster(request).device.memory_bytes if machine else None)


def _request(asked: OptionValues) -> Request:
    fields = {option.field: asked[option.argument] for option in _OPTIONS if option.field}
    for option in _OPTIONS:
        if option.unit is not None and (value := asked[option.argument]) is not None:
            fields[option.field] = value * option.unit
    fields["strategy"], fields["offload"] = _strategy(asked["strategy"], asked["offload"])
    return Request(**fields, sequence_parallel=not asked["no_sequence_parallel"])


def _strategy(name: str | None, tier: str | None) -> tuple[str | None, bool]:
    """A strategy with its tier, and whether the search may choose one."""
    if tier == "any" and name is not None:
        raise BadInput(
            f"--offload any leaves the strategy open, and --strategy {name} is given: name a tier, such as cpu."
        )
    if tier is None or tier == "any":
        return name, tier == "any"
    if name is None:
        raise BadInput(
            f"--offload {tier} needs the strategy that it belongs to (--strategy zero3), or be --offload any."
        )
    return f"{name}@{tier}", False


COUNT = re.compile(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", re.IGNORECASE)
LETTERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _count(text: str) -> float:
    """`70e9`, `70B`, `1.5t`."""
    match = COUNT.fullmatch(text.replace(",", "").replace("_", ""))
    try:
        value = float(match[1]) * LETTERS[match[2].lower()] if match else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise BadInput(f"--params is '{text[:40]}', expected a number of parameters such as 70e9, 70B or 350M.")
    return round(value)


# -- refusals ------------------------------------------------------------------------------------------------------


def _source(asked: OptionValues) -> str:
    """What describes the model. Raises: `BadInput` unless it is exactly one."""
    sources = {"CONFIG": asked["config"], "--model": asked["model"], "--params": asked["params"]}
    named = [name for name, value in sources.items() if value is not None]
    if len(named) != 1:
        found = " and ".join(named) + " were given" if named else "No model was given"
        raise BadInput(f"{found}: give CONFIG, --model NAME or --params COUNT, and only one of them.")
    _check_config(asked["config"])
    return named[0]


def _check_config(path: Path | None) -> None:
    """Raises `BadInput` for the name of a model in the place of a file."""
    if path is None or path.suffix or path.exists():
        return
    meant = str(path) if preset_name(str(path)) else next(iter(get_close_matches(str(path), list(PRESETS), n=1)), "")
    if meant:
        raise BadInput(f"There is no file '{path}', and a model is named by an option: write --model {meant}.")


def _refuse_options(source: str, asked: OptionValues, given: Collection[str]) -> None:
    """What has no meaning beside a configuration, which says what a run is, or beside a bare number of parameters."""
    reasons = {
        "CONFIG": "was given beside a configuration, which decides it: write an override, such as plan.name=zero2.",
        "--params": "says nothing about a bare number of parameters: name a model with --model.",
    }
    for option in _OPTIONS if source in reasons else ():
        if option.argument in given and source not in option.beside:
            raise BadInput(f"{option.flag} {reasons[source]}")
    if asked["calibrate"] and (source != "CONFIG" or asked["gpu"] is not None):
        raise BadInput(
            "--calibrate measures a configuration of `terrazzo train` on this machine: give CONFIG, no --gpu."
        )
    if asked["emit"] is not None and source != "--model":
        raise BadInput("--emit writes the configuration of a model that is planned with --model.")
    if asked["html"] is not None and source != "--model":
        raise BadInput("--html draws the plans of a model that is named with --model.")


# -- the outputs ---------------------------------------------------------------------------------------------------


def _write(answer: Answer | BareAnswer, asked: OptionValues) -> None:
    try:
        if asked["emit"] is not None:
            emit(_best(answer), asked["model"], asked["emit"])
        if asked["picture"] is not None:
            save_picture(answer.chart(), asked["picture"])
        if asked["html"] is not None and isinstance(answer, Answer):
            _write_page(answer, asked)
    except OSError as error:
        raise BadInput(f"'{error.filename}' cannot be written: {error.strerror}.") from error


def _write_page(answer: Answer, asked: OptionValues) -> None:
    """With all plans that are possible, also where one was named."""
    request, frontier = _model_request(asked), answer.frontier
    if frontier is None:
        opened = replace(request, strategy=None, micro_batch=None, checkpointing=None)
        frontier = compare(opened, Framework.parse(asked["framework"]))
    save_page(answer.best, request, frontier, answer.estimate, asked["html"])


def _print(answer: Answer | BareAnswer, asked: OptionValues, config: Config | None) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # × is ? where the output is ASCII, and not an error
    console = Console(highlight=False)
    show(answer.blocks(), console)
    show_bars(answer.chart(), console)
    if isinstance(answer, Answer):
        show(_how_to_run(answer, asked, config), console)


def _how_to_run(answer: Answer, asked: OptionValues, config: Config | None) -> list[TextBlock]:
    """The commands that run the plan, where this version can."""
    here = answer.best.memory.fits is not False and runnable(answer.best.setup)
    start = _start(answer.best.setup.cluster)
    if config is not None and here:
        ranks = _ranks(answer, asked["gpus"], config)
        command = shlex.join(["train", str(asked["config"]), *(asked["overrides"] or []), *ranks])
        return [TextLine(f"\nTo run it: {start} {command}", copied=True)]
    if config is not None or not (here or asked["emit"]):
        return []
    path = asked["emit"] or Path("plan.yaml")
    try:
        left = unfilled(emitted(answer.best, asked["model"], path))
    except BadInput:  # a model that `terrazzo train` cannot build
        return []
    train = " ".join([f"{start} train {shlex.quote(str(path))}", *(f"{key}=..." for key in left)])
    if asked["emit"] is not None:
        return [TextLine(f"\nwritten: {path}. To run it: {train}", copied=True)]
    command = shlex.join([*sys.argv[1:], "--emit", str(path)])
    return [TextLine(f"\nTo run it: {program()} {command} && {train}", copied=True)]


def _ranks(answer: Answer, gpus: str | None, config: Config) -> list[str]:
    """The override that starts the ranks that were asked for, where one host has them and `config` says otherwise."""
    cluster, configured = answer.best.setup.cluster, config.rank_numbers[-1:]
    if gpus is None or list(configured) == [cluster.count] or not _on_one_host(cluster):
        return []
    return [f"launch.ranks={cluster.count}"]


def _start(cluster: Cluster) -> str:
    """What starts ranks on every host; on one this command does."""
    if _on_one_host(cluster):
        return program()
    ranks = min(cluster.count, cluster.device.per_node)
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {cluster.nodes} --nproc-per-node {ranks} {meeting} -m terrazzo"


def _on_one_host(cluster: Cluster) -> bool:
    return cluster.nodes == 1 or cluster.device.kind == "cpu"


def _best(answer: Answer | BareAnswer) -> Estimate:
    assert isinstance(answer, Answer), "options that need a model are refused without one"
    return answer.best
