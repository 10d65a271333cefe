"""What a configuration is to torch, to `tz.shard` and to a shell; of a session or ranks that run nothing is known here.

plan         the plan, offload, precision, mesh and batch
optimizer    the optimizer, and the learning rate of each step
folders      the folders that a run makes, and what it writes into them
run_command  the command that started a run, and the one that goes on with it
"""
