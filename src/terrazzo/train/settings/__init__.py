"""Translates a configuration into objects of torch and arguments of `tz.shard`. Needs no session and no ranks.

plan         plan, offload, precision, mesh and batch
optimizer    the optimizer, and the learning rate of each step
intervals    whether something that is done every so many steps is due
folders      the folders that a run makes
run_command  the command that started a run, and the one that continues it
"""
