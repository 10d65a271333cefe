"""The questions of `terrazzo init`, as a table. Each is an option of the command, or else is asked."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.cli.shared.options import CommandOption

__all__ = ["QUESTIONS", "Question"]


@dataclass(frozen=True)
class Question(CommandOption):
    """An option that is asked for if it is not given; `text` is the question.

    Its parser and default are in `answers`, which imports the planner.
    """

    text: str = ""


QUESTIONS = (
    Question(
        "--goal GOAL",
        "pretrain, from random weights (default), or finetune, from those of a local folder.",
        text="What for: pretrain (random weights) or finetune (a model's own)",
    ),
    Question(
        "--model NAME|PATH",
        "decoder, built in (default to pretrain), a preset such as llama3-8b ('?' lists), or a folder.",
        text="Model: decoder (built in), a preset such as gpt2 (? lists), or a local folder",
    ),
    Question(
        "--data SOURCE",
        "A file, folder, glob or URL, or python-stdlib (default).",
        text="Text: a file, folder or glob, or python-stdlib",
    ),
    Question(
        "--gpu NAME",
        "here (default), cpu, or a GPU such as h100-sxm ('?' lists).",
        text="Machine: here, cpu, or a GPU such as h100-sxm (? lists)",
    ),
    Question("--ranks N", "Processes; default: the GPUs of one host, or one on a CPU.", text="Ranks, one per GPU"),
    Question(
        "--seq TOKENS",
        "Tokens of a sequence; default: as many as the model has positions, at most 1024, 256 for decoder.",
        text="Tokens of a sequence",
    ),
    Question(
        "--global-batch N",
        "Sequences of a step, all ranks; default: 32, or the next multiple of the ranks.",
        text="Sequences of a step, over all ranks",
    ),
    Question("--steps N", "Optimizer steps; default: 1000, or 300 to finetune.", text="Steps"),
)
"""The questions, in an order in which later defaults can depend on earlier answers."""
