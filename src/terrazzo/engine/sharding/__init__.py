"""How a model becomes a sharded one: `tz.shard`, and what comes before it.

Read shard, then prepare, with checks, parts and matrices, what must hold; attach, which puts optimizers on a model; and
forwards, activation checkpointing and compilation, applied before.
"""
