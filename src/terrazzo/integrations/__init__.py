"""Integrations: other people's training loops, with Terrazzo's engine behind them. Each is a thin translation.

Open to other packages:

    accelerate, deepspeed, fsdp2, lightning, peft, transformers   each an integration

What several of them have in common is in `shared`.
"""
