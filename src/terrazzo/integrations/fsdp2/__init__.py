"""`terrazzo.fully_shard`: torch's FSDP2 calls, module by module, with Terrazzo's engine behind them.

for block in model.layers:
    tz.fully_shard(block, **options)
tz.fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters())
"""

from terrazzo.integrations.fsdp2.calls import fully_shard
from terrazzo.integrations.fsdp2.module import FSDPModule, register_fsdp_forward_method

__all__ = ["FSDPModule", "fully_shard", "register_fsdp_forward_method"]
