"""The files that `terrazzo plan` writes. Their names are checked before any work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from terrazzo.cli.shared.written_files import check_file, refuse_other, with_comments, write_model, write_output
from terrazzo.documents import write_json
from terrazzo.errors import BadInput
from terrazzo.planner import Cluster, Estimate
from terrazzo.planner.choice.emit import TrainFiles, train_config
from terrazzo.planner.machine.devices import device
from terrazzo.planner.report.bars import PICTURE_SUFFIXES
from terrazzo.planner.report.words import parameters_text, verdict
from terrazzo.words import FILL_IN

__all__ = ["check_files", "emit", "files_of", "missing_parts"]

EMITTED = (".yaml", ".yml", ".json")


def check_files(emitted: Path | None, picture: Path | None, page: Path | None) -> None:
    """Raise `BadInput` for names that cannot be written."""
    pictured, paged = ("--picture", picture, PICTURE_SUFFIXES), ("--html", page, (".html", ".htm"))
    for option, path, suffixes in (("--emit", emitted, EMITTED), pictured, paged):
        if path is not None:
            check_file(option, path, suffixes)


def emit(estimate: Estimate, model: str, path: Path) -> None:
    """Write the configuration of a plan, and the model's config.json if `model` is not a folder that has one.

    Args:
        model: the value of `--model`.
        path: of the configuration.

    Raises:
        BadInput: the plan cannot fit or run, or there is another configuration, or another model's config.json.
    """
    if estimate.memory.fits is False:
        raise BadInput(f"--emit: nothing is written, because the plan {verdict(estimate.memory)}.")
    files = files_of(estimate, model, path)
    as_json = path.suffix.lower() == ".json"
    text = write_json(files.config) if as_json else with_comments(files.config, _comments(estimate, files))
    refuse_other(path, text, f"--emit would replace '{path}', which has other settings: name another file, or move it.")
    if files.model_config is not None:
        write_model(files.model_config, path.with_suffix("") / "config.json", "--emit")
    write_output(path, text)


def files_of(estimate: Estimate, model: str, path: Path) -> TrainFiles:
    """The contents that `emit` writes, with `FILL_IN` for the unknown data.

    Training begins with the model folder's weights if it has any. Adapters always do, as they cannot begin otherwise.

    Raises:
        BadInput: this version cannot run the plan, or cannot build the model.
    """
    files = train_config(estimate.setup, model, path.with_suffix(""))
    section, config = dict(files.config["model"]), dict(files.config)
    if "path" in section:
        has_weights = any(Path(section["path"]).glob("*.safetensors"))
        section["weights"] = "pretrained" if has_weights or "lora" in config else "random"
    data = {"source": FILL_IN, "tokenizer": FILL_IN, **config.pop("data", {})}
    config.pop("model")
    return replace(files, config={"model": section, "data": data, **config})


def missing_parts(files: TrainFiles) -> list[str]:
    """The keys that the user has to fill in."""
    return [f"data.{key}" for key, value in files.config["data"].items() if value == FILL_IN]


def _planned_again(cluster: Cluster) -> list[str]:
    """How to plan the file again, where its devices have a name: without it, it is about those of this machine."""
    try:
        known = device(cluster.device.name) == cluster.device
    except BadInput:
        return []
    return [f"To plan it again: `terrazzo plan FILE --gpu {cluster.device.name}`."] if known else []


def _comments(estimate: Estimate, files: TrainFiles) -> dict[str, list[str]]:
    """The comments of each section: what it is, and what the user has to fill in."""
    setup, section = estimate.setup, files.config["model"]
    size, folder = parameters_text(setup.model), section.get("path")
    if section.get("weights") == "pretrained":
        begins = f"{size}, which begin as the weights in '{folder}'."
        if not any(Path(folder).glob("*.safetensors")):
            begins += " Put its *.safetensors there: adapters are trained beside them, and a run does not start before."
    else:
        begins = f"{size}, which begin as random numbers: a model that is trained from its start."
        if folder is not None:
            begins += f" To go on from its weights: put its *.safetensors into '{folder}', and weights: pretrained."
    data = "Your text: a file, a folder, a glob or a URL."
    if files.config["data"]["tokenizer"] == FILL_IN:
        data += " tokenizer: the folder of the model's Hugging Face tokenizer (tokenizer.json), or bytes."
    left = (
        f" Fill in {' and '.join(missing_parts(files))}: a run does not start before." if missing_parts(files) else ""
    )
    return {
        "": [
            "Written by `terrazzo plan --emit`; docs/reference/train-config.md has every key.",
            f"{setup.cluster.count} x {setup.cluster.device.name}: {verdict(estimate.memory)}.",
            *_planned_again(setup.cluster),
        ],
        "model": [begins],
        "data": [data + left],
        "batch": [f"{setup.global_batch * setup.sequence:,} tokens in a step."],
        "optimizer": ["lr is 3.0e-4 unless you say otherwise; the planner knows of none."],
        "train": ["steps: 1000 unless you say otherwise."],
    }
