"""Hugging Face's Trainer on Terrazzo: two lines differ from a script without it. Runs on a CPU in seconds:

torchrun --nproc-per-node 2 examples/integrations/trainer_script.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from terrazzo.integrations.transformers import TerrazzoArguments, Trainer  # 1: in place of transformers.Trainer

args = TrainingArguments(
    "runs/trainer",
    use_cpu=not torch.cuda.is_available(),
    max_steps=20,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    logging_steps=5,
    save_steps=10,
    report_to="none",
)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
starts = torch.arange(128) % 60
tokens = [(start + torch.arange(16)) % 64 for start in starts]  # each token is the one before it plus one
data = [{"input_ids": each, "labels": each} for each in tokens]

trainer = Trainer(model, args, train_dataset=data, terrazzo=TerrazzoArguments(plan="zero3"))  # 2: the plan
trainer.train(resume_from_checkpoint=None)  # True continues from the newest complete checkpoint
trainer.save_model("runs/trainer/final")  # from_pretrained loads it
