"""TRL's SFTTrainer with LoRA on Terrazzo: a class of two bases, and the plan. Runs on a CPU in seconds:

python examples/trl/tiny_model.py my-model
torchrun --nproc-per-node 2 examples/trl/sft.py my-model
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from terrazzo.integrations.transformers import TerrazzoArguments, TerrazzoTrainerMixin


class MySFTTrainer(TerrazzoTrainerMixin, SFTTrainer):
    """TRL's trainer on Terrazzo."""

    terrazzo = TerrazzoArguments(plan="zero3")


args = SFTConfig(
    "runs/sft",
    use_cpu=not torch.cuda.is_available(),
    max_steps=6,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=6,
    max_length=32,
    report_to="none",
)
data = Dataset.from_list([{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3}"} for i in range(2, 34)])
trainer = MySFTTrainer(
    model=sys.argv[1],
    args=args,
    train_dataset=data,
    peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("runs/sft/final")  # the adapter, as PEFT loads it
