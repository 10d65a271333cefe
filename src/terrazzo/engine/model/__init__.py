"""A sharded model as its user has it: how it is made, what can be asked of it, how it looks to a training loop.

Read shard, which makes one of all the rest with prepare, checks, materialize and attach; engine, what can be asked of
it, with names and description; state, with pieces, restore and digest, what there is to save; then module, stand_in and
measured, what a loop sees, and average, whole and full_state, what it can ask for. forwards and methods come before
sharding, and wrappers refuses torch's data parallelism around it. together is what ranks do as one.
"""
