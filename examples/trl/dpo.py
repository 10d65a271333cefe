"""TRL's DPOTrainer on Terrazzo: a class of two bases, and the plan. Runs on a CPU in seconds:

python examples/trl/tiny_model.py my-model
torchrun --nproc-per-node 2 examples/trl/dpo.py my-model
"""

import sys

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from terrazzo.integrations.transformers import TerrazzoArguments, TerrazzoTrainerMixin


class MyDPOTrainer(TerrazzoTrainerMixin, DPOTrainer):
    """TRL's trainer on Terrazzo. The model is split over ranks; the reference model is whole on each."""

    terrazzo = TerrazzoArguments(plan="zero3")


args = DPOConfig(
    "runs/dpo",
    use_cpu=not torch.cuda.is_available(),
    max_steps=6,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=6,
    max_length=32,
    report_to="none",
)
pairs = [{"prompt": f"w{i} w{i + 1}", "chosen": f" w{i + 2} w{i + 3}", "rejected": f" w{i} w{i}"} for i in range(2, 34)]
trainer = MyDPOTrainer(model=sys.argv[1], args=args, train_dataset=Dataset.from_list(pairs))
trainer.train()
trainer.save_model("runs/dpo/final")  # from_pretrained loads it
