"""From a sharded model to a complete folder: the copy of its state, and who writes it, this process or another one."""
