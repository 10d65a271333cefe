"""LoRA on a sharded base, saved as a PEFT folder. Runs on a CPU in seconds:

torchrun --nproc-per-node 2 examples/integrations/peft_script.py my-adapter
"""

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import terrazzo as tz
from terrazzo.integrations.peft import save_adapter

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = LlamaForCausalLM(  # LlamaForCausalLM.from_pretrained(...), of course
    LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

model, optimizer = tz.shard(model, optimizer, plan="zero3")  # the frozen base is split too

tokens = torch.arange(64).repeat(8, 1) + torch.arange(8)[:, None]
for step in range(20):
    mine = tokens[rank::ranks]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    tz.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1} | loss {loss.item():.4f}", flush=True)

save_adapter(model, sys.argv[1])
dist.destroy_process_group()
