"""Doors: other people's training loops, with Terrazzo's engine behind them. Each is a thin translation.

Open to other packages:

    accelerate, deepspeed, fsdp2, lightning, peft, transformers   each a door

What several of them have in common is in `shared`.
"""
