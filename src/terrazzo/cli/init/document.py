"""Writes the file of `terrazzo init`: the planner's choice for the answers, as YAML with comments that say why."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrazzo.cli.init.answers import DECODER, InitAnswers, Machine, Model
from terrazzo.cli.shared.terminal import say
from terrazzo.cli.shared.written_files import with_comments, write_model, write_output
from terrazzo.config import Config, config_from_dict
from terrazzo.documents import write_json
from terrazzo.errors import BadInput
from terrazzo.messages import GIB, counted
from terrazzo.planner import Estimate, Frontier, Request
from terrazzo.planner.api import compare
from terrazzo.planner.choice.emit import TrainFiles, train_config
from terrazzo.planner.setup.build_setup import of_one_rank
from terrazzo.planner.setup.choice_names import TRIED_MODES
from terrazzo.shell_command import terrazzo_command
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.train.preflight import check

__all__ = ["write_config"]

LARGEST_UNTIMED = 8
"""Largest micro-batch for a device whose speed is not known: more would only take memory."""
RATES = {"pretrain": 3e-4, "finetune": 2e-5}
DECODER_RATE = 1e-3


def write_config(file: Path, answers: InitAnswers) -> None:
    """Choose, check and write a configuration.

    Raises:
        BadInput: no choice fits or can run, before anything is written; or a file cannot be written.
    """
    model, machine = answers["model"], answers["gpu"]
    frontier = _search(answers)
    best = _best(frontier, answers)
    folder = file.with_suffix("")
    named = model.shape if model.built_in else model.folder or model.name
    files = train_config(best.setup, named, folder)
    document = _document(files, answers, file)
    config = config_from_dict(document, origin=f"'{file}'")
    notes = _checked(config, files, answers["ranks"]) if machine.is_here else []
    text = _text(document, _reasons(frontier, best, answers), file)
    if files.model_config is not None:
        write_model(files.model_config, folder / "config.json", "terrazzo init")
    write_output(file, text)
    say(f"{best.setup.plan.name}: {_memory(best)}")
    for note in notes:
        say(f"note: {note}")
    say(f"written: {file}")
    shown = shlex.quote(str(file))
    where = "" if machine.is_here else f" --gpu {machine.cluster.device.name} --gpus {answers['ranks']}"
    say(f"next:    {terrazzo_command()} plan {shown}{where}\n         {terrazzo_command()} train {shown}")


# -- the choice ----------------------------------------------------------------------------------------------------


def _search(answers: InitAnswers, checkpointing: str | None = None) -> Frontier:
    machine = answers["gpu"]
    cluster, ranks = machine.cluster, answers["ranks"]
    request = Request(
        answers["model"].shape,
        ranks,
        gpu=of_one_rank(cluster.device, ranks),
        host_memory_bytes=cluster.host_memory_bytes,
        sequence=answers["seq"],
        global_batch=answers["global_batch"],
        precision=_precision(machine),
        checkpointing=checkpointing,
        offload=True,
    )
    return compare(request)


def _best(frontier: Frontier, answers: InitAnswers) -> Estimate:
    """The planner's first choice. If no speed is known: the first that recomputes least, in larger micro-batches."""
    if frontier.best is None:
        nearest = frontier.nearest
        why = f" Nearest is {nearest.strategy}: {nearest.reason.rstrip('.')}." if nearest else ""
        raise BadInput(
            f"No plan of {answers['model'].name} fits on {_machine_text(answers)}, offload included.{why} Take more"
            " --ranks, another --gpu, a shorter --seq or a smaller --model."
        )
    if frontier.best.time is not None:
        return frontier.best
    sure = [one for one in frontier.ranked if one.memory.fits_surely is not False] or list(frontier.ranked)
    least = min(TRIED_MODES.index(one.setup.checkpointing) for one in sure)
    least_recomputing = [one for one in sure if one.setup.checkpointing == TRIED_MODES[least]]
    same = [one for one in least_recomputing if one.setup.plan == least_recomputing[0].setup.plan]
    return max(same, key=lambda one: one.setup.micro_batch if one.setup.micro_batch <= LARGEST_UNTIMED else 0)


def _precision(machine: Machine) -> str:
    if machine.on_cpu:
        return "fp32"
    return "fp16" if machine.cluster.device.lacks("bf16") else "bf16"


def _checked(config: Config, files: TrainFiles, ranks: int) -> list[str]:
    """Refuse now what `terrazzo train` would refuse; returns its notes. The model's config.json is not written yet."""
    if files.model_config is None:
        return check(config, ranks)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(write_json(files.model_config), encoding="utf-8")
        model = config.model.model_copy(update={"path": Path(folder)})
        return check(config.model_copy(update={"model": model}), ranks)


# -- the document --------------------------------------------------------------------------------------------------


def _document(files: TrainFiles, answers: InitAnswers, file: Path) -> dict[str, Any]:
    """All sections of the configuration, in the order in which one reads them."""
    model, goal, config = answers["model"], answers["goal"], dict(files.config)
    log = Path("runs") / file.stem
    section = dict(DECODER) if model.built_in else config["model"]
    rate = DECODER_RATE if model.built_in else RATES[goal]
    offload, launch = dict(config.get("offload", {})), dict(config.get("launch", {}))
    if "path" in offload:
        offload["path"] = str(RunFolder(log).swap)
    if answers["gpu"].on_cpu:
        launch["device"] = "cpu"
    return {
        "model": section | ({"weights": "pretrained"} if goal == "finetune" else {}),
        "data": {"source": answers["data"], **config.get("data", {})},
        "plan": config["plan"],
        **({"offload": offload} if offload else {}),
        "precision": config["precision"],
        "batch": config["batch"],
        "optimizer": {**config["optimizer"], "lr": rate},
        "schedule": {"name": "cosine", "warmup_steps": max(1, answers["steps"] // 20)},
        "train": {"steps": answers["steps"], "eval_every": _every(answers["steps"], 10), **config["train"]},
        "checkpoint": {"every": _every(answers["steps"], 4)},
        **({"launch": launch} if launch else {}),
        "log": {"folder": str(log)},
    }


def _every(steps: int, times: int) -> int:
    """An interval that comes `times` times in a run, but at least 100 steps (or the run), to take little of it."""
    return max(min(steps, 100), steps // times)


def _reasons(frontier: Frontier, best: Estimate, answers: InitAnswers) -> dict[str, list[str]]:
    """The comments of each section: why it is as it is."""
    setup, machine = best.setup, answers["gpu"]
    batch = (
        f"{setup.global_batch} sequences of {setup.sequence} tokens in a step,"
        f" {setup.global_batch * setup.sequence:,} tokens over all ranks. A rank takes {setup.micro_batch} at a time,"
        f" in {setup.micro_batches} micro-batch{'es' if setup.micro_batches > 1 else ''}."
    )
    return {
        "model": [_model_reason(answers["model"], answers["goal"])],
        "data": ["A file, a folder, a glob or a URL. `tokenizer` is a Hugging Face tokenizer's folder, or `bytes`."],
        "plan": _plan_reasons(frontier, best, answers),
        "offload": ["For the plan's states that are not on the device: nothing fits without that."],
        "precision": [_precision_reason(setup.precision.loss_scaling is not None, machine)],
        "batch": [batch],
        "optimizer": ["The rate is a usual first value, and not the planner's: try others."],
        "train": [f"eval_every: steps between losses on held-out data. {_checkpointing_reason(setup.checkpointing)}"],
        "checkpoint": ["Ctrl-C saves too, and the same command continues."],
        "launch": ["How many processes `terrazzo train` starts. torchrun and Slurm say it themselves."],
    }


def _plan_reasons(frontier: Frontier, best: Estimate, answers: InitAnswers) -> list[str]:
    name, pace = best.setup.plan.name, best.time
    if answers["ranks"] == 1 and "@" not in name:
        chosen = "A single rank has no others to split states over."
    elif pace is not None:
        speed = f"{pace.tokens_per_s_per_gpu:,.0f} tokens/s per rank"
        chosen = f"{name} is expected to be the fastest that fits: about {speed}."
    else:
        chosen = f"No speed is known of this device: of what fits, {name} sends the fewest bytes between ranks."
    refused = {one.strategy: one.reason for one in frontier.refused if one.setup is not None}
    shown = [f"{name} does not fit: {reason}" for name, reason in refused.items()][:3]
    compared = f"{frontier.considered} combinations of plan, micro-batch and recomputation were compared for"
    return [f"{compared} {_machine_text(answers)}.", chosen, f"Memory of a rank: {_memory(best)}.", *shown]


def _model_reason(model: Model, goal: str) -> str:
    size = f"{model.shape.numel / 1e6:,.1f} M parameters"
    if goal == "finetune":
        return f"{size}, which begin as the folder's weights."
    return f"{size}, which begin as random numbers." + ("" if model.folder else " Shape and size are yours to change.")


def _precision_reason(scaled: bool, machine: Machine) -> str:
    if machine.on_cpu:
        return "The one precision that every CPU computes in quickly."
    if scaled:
        return "This GPU has no bf16: products in fp16 with loss scaling; weights are updated in fp32."
    return "Products in bf16, the GPU's faster format; weights are updated in fp32."


def _checkpointing_reason(mode: str) -> str:
    if mode == "none":
        return "There is room to keep all activations."
    return (
        f"activation_checkpointing: {mode} computes activations again in backward, which makes room for what is above."
    )


def _memory(best: Estimate) -> str:
    """The memory that is expected to be used: of a rank's device, and of its host and disks by all ranks there."""
    names = {"device": "", "host": " of each host's memory", "disk": " of each host's disks"}
    amounts = []
    for room in best.memory.rooms:
        of = "" if room.capacity is None else f" of {room.capacity / GIB:,.1f}"
        amounts.append(f"{room.expected / GIB:,.1f}{of} GiB{names[room.name]}")
    return f"{' and '.join(amounts)} expected"


def _machine_text(answers: InitAnswers) -> str:
    machine = answers["gpu"]
    return f"{counted(answers['ranks'], 'rank')} on a {machine.cluster.device.name}" if machine.on_cpu else (
        f"{answers['ranks']} x {machine.cluster.device.name}"
    )  # fmt: skip


def _text(document: Mapping[str, Any], reasons: Mapping[str, list[str]], file: Path) -> str:
    shown = shlex.quote(str(file))
    head = [
        "Written by `terrazzo init`; docs/reference/train-config.md has every key.",
        "",
        f"    terrazzo train {shown}",
    ]
    return with_comments(document, {"": head, **reasons})
