"""Arguments of torch's `FullyShardedDataParallel` (FSDP1), as a mapping of names.

In reading order:

    keys      every argument, with its meaning
    read      arguments to the neutral description
    findings  what FSDP1 refuses, or takes otherwise than it looks
    write     the neutral description to arguments
    dialect   the record of these functions, which the registry has by its name
"""
