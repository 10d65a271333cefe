"""Arguments of torch's `fully_shard` (FSDP2), its policies, and the calls on an `FSDPModule`, as a mapping of names.

In reading order:

    keys        every argument of `fully_shard`, of its policies and of the calls on an `FSDPModule`
    read        arguments to the neutral description; calls `read_mesh`
    read_mesh   the row of the table that a mesh and `reshard_after_forward` mean
    findings    what FSDP2 refuses, or takes otherwise than it looks
    write       the neutral description to arguments; calls `write_mesh`
    write_mesh  the mesh and `reshard_after_forward` of a row
    dialect     the record of these functions, which the registry has by its name
"""
