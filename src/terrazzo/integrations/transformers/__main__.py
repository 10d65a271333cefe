"""Run a script whose `transformers.Trainer`, and all that derives from it, is Terrazzo's.

torchrun --nproc-per-node 2 -m terrazzo.integrations.transformers --plan zero3 run_clm.py --output_dir out ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import transformers

from terrazzo.integrations.shared.script_runner import run_and_exit
from terrazzo.integrations.transformers import TerrazzoArguments, TerrazzoTrainerMixin, Trainer
from terrazzo.processes.tether import become

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Run the script that `arguments` name, with what follows it as its own.

    Raises:
        BadInput: no such plan or precision; the script has not begun.
    """
    parser = argparse.ArgumentParser("python -m terrazzo.integrations.transformers", description=__doc__)
    default = "default: what the script's TrainingArguments say"
    parser.add_argument("--plan", help=f"as for tz.shard; {default}")
    parser.add_argument("--precision", help=f"as for tz.shard; {default}")
    parser.add_argument("-m", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="what follows are its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    told = parser.parse_args(arguments)
    TerrazzoTrainerMixin.terrazzo = TerrazzoArguments(plan=told.plan, precision=told.precision).resolved()
    transformers.Trainer = transformers.trainer.Trainer = Trainer  # before what derives from it is imported
    become([*(["-m"] if told.m else []), told.script, *told.arguments])


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
