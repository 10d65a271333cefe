"""Integrations: other people's training loops, with Terrazzo's engine behind them. Each is a thin translation.

    accelerate    Hugging Face's Accelerator
    deepspeed     DeepSpeed's interface, and unmodified scripts that import it
    fsdp2         torch's fully_shard
    lightning     strategies of Lightning's Trainer and of Fabric
    peft          adapters on sharded models
    transformers  Hugging Face's Trainer, and what derives from it
    shared        what several of them have in common

Each `__init__` lists its modules in one order:

    Taken and refused  what the user's objects, files and environment say becomes a document, which is read by the
                       library's dialect: nothing else decides what a key means. `shared.honour` refuses what cannot be
                       done of it, or names it in a warning. `shared.from_description` makes an `EngineSetup` of the
                       rest. All that is in the module `requested`, of which the others want that `EngineSetup`: by
                       `requested_setup` (`fsdp2`, `transformers`), by `RequestedSetup.setup` where a script says some
                       before there is a model (`accelerate`), as `Configuration.setup` beside what the loop may ask of
                       the file later (`deepspeed`). Not so in `lightning`, where a strategy of Terrazzo's own takes
                       the arguments of `tz.shard` and reads Lightning's `precision` by a table of its own; nor in
                       `peft`.
    Built              the other library's classes, on which its loop goes on. `EngineSetup.shard` shards the model.
    Translated         the loop's own calls, and its checkpoints: `shared.checkpoints` saves, opens and resumes them.
    Changed            of the other library's, of the user's objects or of the process; and how long it stays so.

All but `peft`, which comes before `tz.shard`, shard a model in place, as that does, and give a model of transformers on
which ranks share weights a `generate` of its own (`shared.generation`).

To add one: a folder of these four, with the other library's names, and its place in the list above. Its test is a loop
of the other library's, which has to give that library's losses.

Open to other packages:

    accelerate, deepspeed, fsdp2, lightning, peft, transformers   each an integration
"""
