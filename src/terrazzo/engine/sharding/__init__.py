"""How a model becomes a sharded one: `tz.shard`, and what comes before it.

Read shard, then prepare; checks, mesh_checks, matrix_checks and packed_checks, what must hold; compared, what ranks
have alike; attach, which puts optimizers on a model; and forwards, activation checkpointing and compilation, applied
before.
"""
