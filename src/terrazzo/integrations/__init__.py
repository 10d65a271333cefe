"""Integrations: other people's training loops, with Terrazzo's engine behind them. Each is a thin translation.

    accelerate    Hugging Face's Accelerator
    deepspeed     DeepSpeed's interface, and unmodified scripts that import it
    fsdp2         torch's fully_shard
    lightning     strategies of Lightning's Trainer and of Fabric
    peft          adapters on sharded models
    transformers  Hugging Face's Trainer, and what derives from it
    shared        what several of them have in common

What an integration changes of the other library's, of a user's objects or of the process stands in its `__init__`,
under "What it changes". All of them shard a model in place, as `tz.shard` does, and give a model of transformers on
which ranks share weights a `generate` of its own (`shared.generation`).

How one is written. A folder has the other library's names; its objects stay the user's own. What the user asks for
becomes a document, which the library's dialect reads: nothing else decides what a key means. `shared.honour` refuses
what cannot be done of it, or names it in a warning. `shared.from_description` makes an `EngineSetup` of the rest, which
shards the model. The loop's own calls and its checkpoints (`shared.saving`) are translated last. Its test is a loop of
the other library's, which has to give that library's losses.

Open to other packages:

    accelerate, deepspeed, fsdp2, lightning, peft, transformers   each an integration
"""
