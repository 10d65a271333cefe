"""A training script for Hugging Face's Trainer. Runs on a CPU in seconds:

torchrun --nproc-per-node 2 examples/migration/before_trainer.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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

trainer = Trainer(model, args, train_dataset=data)
trainer.train(resume_from_checkpoint=None)  # True continues from the newest complete checkpoint
trainer.save_model("runs/trainer/final")  # from_pretrained loads it
