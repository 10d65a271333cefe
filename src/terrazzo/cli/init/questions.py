"""The questions of `terrazzo init`, as a table. Each is an option of the command, or else is asked."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["QUESTIONS", "Question"]


class Question(NamedTuple):
    """One question. Its parser and default are in `answers`, which imports the planner.

    Attributes:
        name: its key in `InitAnswers`.
        metavar: stands for the value in the help.
        text: of the question.
        help: of the option.
    """

    name: str
    metavar: str
    text: str
    help: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


QUESTIONS = (
    Question(
        "goal",
        "GOAL",
        "What for: pretrain (random weights) or finetune (a model's own)",
        "pretrain, from random weights (default), or finetune, from those of a local folder.",
    ),
    Question(
        "model",
        "NAME|PATH",
        "Model: decoder (built in), a preset such as gpt2 (? lists), or a local folder",
        "decoder, built in (default to pretrain), a preset such as llama3-8b ('?' lists), or a folder.",
    ),
    Question(
        "data",
        "SOURCE",
        "Text: a file, folder or glob, or python-stdlib",
        "A file, folder, glob or URL, or python-stdlib (default).",
    ),
    Question(
        "gpu",
        "NAME",
        "Machine: here, cpu, or a GPU such as h100-sxm (? lists)",
        "here (default), cpu, or a GPU such as h100-sxm ('?' lists).",
    ),
    Question("ranks", "N", "Ranks, one per GPU", "Processes; default: the GPUs of one host, or one on a CPU."),
    Question(
        "seq",
        "TOKENS",
        "Tokens of a sequence",
        "Tokens of a sequence; default: as many as the model has positions, at most 1024, 256 for decoder.",
    ),
    Question(
        "global_batch",
        "N",
        "Sequences of a step, over all ranks",
        "Sequences of a step, all ranks; default: 32, or the next multiple of the ranks.",
    ),
    Question("steps", "N", "Steps", "Optimizer steps; default: 1000, or 300 to finetune."),
)
"""The questions, in an order in which later defaults can depend on earlier answers."""
