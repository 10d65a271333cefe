"""TRL's RewardTrainer on Terrazzo: a class of two bases, and the plan. Runs on a CPU in seconds:

python examples/trl/tiny_model.py my-model
torchrun --nproc-per-node 2 examples/trl/reward.py my-model
"""

import sys

import torch
from datasets import Dataset
from transformers import set_seed
from trl import RewardConfig, RewardTrainer

from terrazzo.integrations.transformers import TerrazzoArguments, TerrazzoTrainerMixin


class MyRewardTrainer(TerrazzoTrainerMixin, RewardTrainer):
    """TRL's trainer on Terrazzo."""

    terrazzo = TerrazzoArguments(plan="zero3")


args = RewardConfig(
    "runs/reward",
    use_cpu=not torch.cuda.is_available(),
    max_steps=6,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=6,
    max_length=32,
    report_to="none",
)
pairs = [{"chosen": f"w{i} w{i + 1} w{i + 2}", "rejected": f"w{i} w{i} w{i + 1}"} for i in range(2, 34)]
set_seed(0)  # the head, which the folder does not have, is random
trainer = MyRewardTrainer(model=sys.argv[1], args=args, train_dataset=Dataset.from_list(pairs))
trainer.train()
trainer.save_model("runs/reward/final")  # AutoModelForSequenceClassification.from_pretrained loads it
