"""Doors: other people's training loops, with Terrazzo's engine behind them. Each is a thin translation.

Open to other packages:

    accelerate, deepspeed, fsdp2, lightning, peft, transformers   each a door

What stands beside them serves several:

    engine_setup  from the neutral description of a configuration to `tz.shard`
    owners        whose an optimizer is
    saving        where a checkpoint of the same name lies
    generation    of text, by ranks together
"""
