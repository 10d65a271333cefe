"""Hugging Face's Trainer on Terrazzo, and every trainer derived from it, such as TRL's SFTTrainer.

    class MySFT(TerrazzoTrainerMixin, SFTTrainer): ...

    Trainer(model, args, train_dataset=data, terrazzo=TerrazzoArguments(plan="zero3")).train()

An unmodified script runs with `torchrun -m terrazzo.integrations.transformers --plan zero3 run_clm.py ...`.

Taken and refused:

    requested  what `TrainingArguments` ask of the engine

Built, and translated:

    trainer    `Trainer`, and the mixin that makes one of any other; its checkpoints

Changed:

    with `python -m`        `transformers.Trainer` and `transformers.trainer.Trainer`, sys.argv, sys.path (`__main__`)
    while one is made       `transformers.trainer.Accelerator` is that of `integrations.accelerate` (`trainer`)
    while it saves          the dtype in the model's config, which becomes that of the saved weights (`trainer`)
"""

from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.transformers.trainer import TerrazzoTrainerMixin, Trainer

__all__ = ["TerrazzoArguments", "TerrazzoTrainerMixin", "Trainer"]
