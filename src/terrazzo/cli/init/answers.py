"""Parses the answers of `terrazzo init`, and has their defaults, which depend on earlier answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from terrazzo.cli.init.questions import Question
from terrazzo.cli.shared.arguments import whole_number
from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.files import is_url
from terrazzo.messages import ALL, did_you_mean
from terrazzo.planner import Cluster, ModelShape, model_shape
from terrazzo.planner.machine.devices import cpu_host, device, this_machine
from terrazzo.planner.model.loading import preset_name
from terrazzo.planner.model.presets import PRESETS
from terrazzo.planner.setup.arguments import MOST_DEVICES
from terrazzo.train.data.sources import find_files
from terrazzo.train.planning.as_setup import setup_of

__all__ = ["ANSWERS", "DECODER", "InitAnswers", "Machine", "Model", "answer"]

GOALS = ("pretrain", "finetune")
DECODER = {"kind": "decoder", "dim": 256, "layers": 6, "heads": 4}
"""The built-in model: it needs no files, and is small enough for a CPU."""

LONGEST = 1024
"""Longest default of --seq: many models have more positions than there is memory for."""


@dataclass(frozen=True)
class Model:
    """A model to train: a `folder`, the built-in decoder, or else a preset; `name` is what was given."""

    name: str
    shape: ModelShape
    folder: Path | None = None

    @property
    def built_in(self) -> bool:
        """Whether it is the built-in decoder, and not a folder of the same name."""
        return self.name == "decoder" and self.folder is None


@dataclass(frozen=True)
class Machine:
    """Where the run will be. `is_here`: it is this machine, so that its limits can be checked."""

    cluster: Cluster
    is_here: bool

    @property
    def on_cpu(self) -> bool:
        return self.cluster.device.kind == "cpu"


class InitAnswers(TypedDict, total=False):
    """The answers so far, by the question's name."""

    goal: str
    model: Model
    data: str
    gpu: Machine
    ranks: int
    seq: int
    global_batch: int
    steps: int


def _goal(text: str, answers: InitAnswers) -> str:
    if text not in GOALS:
        raise BadInput(f"--goal is '{text}', expected one of {', '.join(GOALS)}.{did_you_mean(text, GOALS)}")
    return text


def _default_model(answers: InitAnswers) -> str | None:
    return "decoder" if answers["goal"] == "pretrain" else None


def _model(text: str, answers: InitAnswers) -> Model:
    path = Path(text)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    if answers["goal"] == "finetune" and (folder is None or not any(folder.glob("*.safetensors"))):
        raise BadInput(
            f"--model is '{text}', which holds no weights to begin from: name a local folder with config.json and"
            " *.safetensors, or take --goal pretrain."
        )
    if text == "decoder" and folder is None:
        return Model(text, setup_of(config_from_dict({"model": DECODER, "launch": {"device": "cpu"}}), 1).model)
    if folder is None and preset_name(text) is None and text != ALL:
        raise BadInput(
            f"--model is '{text}', which is neither decoder, a preset nor a folder here."
            f"{did_you_mean(text, ('decoder', *PRESETS))} {ALL!r} lists the presets."
        )
    return Model(text, model_shape(text), folder)


def _data(text: str, answers: InitAnswers) -> str:
    """The source, which must exist; a URL is not looked up yet."""
    if not is_url(text):
        find_files(text)
    return text


def _machine(text: str, answers: InitAnswers) -> Machine:
    here = this_machine()
    if text == "cpu":
        return Machine(cpu_host(here.host_memory_bytes), is_here=True)
    if text == "here":
        return Machine(here, is_here=True)
    named = device(text)
    return Machine(Cluster(named, named.per_node), is_here=False)


def _default_ranks(answers: InitAnswers) -> str:
    machine = answers["gpu"]
    return "1" if machine.on_cpu else str(machine.cluster.count)


def _ranks(text: str, answers: InitAnswers) -> int:
    machine = answers["gpu"]
    ranks = whole_number("--ranks", text, MOST_DEVICES)
    if machine.is_here and not machine.on_cpu and ranks > machine.cluster.count:
        raise BadInput(f"--ranks is {ranks}, but this machine has {machine.cluster.count} GPUs, one for each rank.")
    return ranks


def _default_sequence(answers: InitAnswers) -> str:
    model = answers["model"]
    return "256" if model.built_in else str(min(model.shape.positions or LONGEST, LONGEST))


def _sequence(text: str, answers: InitAnswers) -> int:
    sequence, positions = whole_number("--seq", text), answers["model"].shape.positions
    if not answers["model"].built_in and positions and sequence > positions:
        raise BadInput(f"--seq is {sequence}, but {answers['model'].name} has positions for {positions} tokens.")
    return sequence


def _default_batch(answers: InitAnswers) -> str:
    ranks = answers["ranks"]
    return str(-(-32 // ranks) * ranks)


def _batch(text: str, answers: InitAnswers) -> int:
    batch, ranks = whole_number("--global-batch", text), answers["ranks"]
    if batch % ranks:
        raise BadInput(
            f"--global-batch is {batch}, which {ranks} ranks cannot share: take {batch // ranks * ranks or ranks} or"
            f" {(batch // ranks + 1) * ranks}."
        )
    return batch


class _Answer(NamedTuple):
    """How a question is answered. Both functions get the answers to earlier questions.

    Attributes:
        default: the default as text; None if there is none.
        read: parses the text of an answer; raises `BadInput` for one that is not possible.
    """

    default: Callable[[InitAnswers], str | None]
    read: Callable[[str, InitAnswers], Any]


ANSWERS = {
    "goal": _Answer(lambda _: "pretrain", _goal),
    "model": _Answer(_default_model, _model),
    "data": _Answer(lambda _: "python-stdlib", _data),
    "gpu": _Answer(lambda _: "here", _machine),
    "ranks": _Answer(_default_ranks, _ranks),
    "seq": _Answer(_default_sequence, _sequence),
    "global_batch": _Answer(_default_batch, _batch),
    "steps": _Answer(
        lambda answers: "1000" if answers["goal"] == "pretrain" else "300",
        lambda text, _: whole_number("--steps", text),
    ),
}
"""For each question, by its name."""


def answer(question: Question, text: str | None, answers: InitAnswers) -> Any:
    """The answer that `text` gives, or the default if it is None.

    Raises:
        BadInput: the answer is not possible, or there is no default.
    """
    default, read = ANSWERS[question.argument]
    text = default(answers) if text is None else text
    if text is None:
        raise BadInput(f"{question.flag} has no default here. {question.text}?")
    return read(text, answers)
