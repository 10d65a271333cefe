"""A sharded model as one object, and what its ranks agree on.

Read engine, what can be asked of it, with names and description; gradients, blocks and average, what it has of each;
drivers, what steps it; and accumulation. together is what ranks do as one, unused a backward that no step uses, digest
and alike what they compare, and wrappers refuses torch's data parallelism.
"""
