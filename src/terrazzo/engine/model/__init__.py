"""A sharded model as its user has it: how it is made, what can be asked of it, how it looks to a training loop.

Read shard, which makes one of all the rest with prepare, checks, materialize and attach; engine, what can be asked of
it, with state, digest and names, what there is to save; then module and stand_in, what a loop sees. forwards comes
before sharding, and wrappers refuses torch's data parallelism around it.
"""
