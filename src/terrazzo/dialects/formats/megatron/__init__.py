"""Megatron-LM's arguments, in a shell script, a file of arguments, or as keys of YAML.

In reading order:

    keys             every argument, with its meaning
    keys_others      the arguments that no setting stands for
    read             ranks, precision and memory; calls `read_training`
    read_training    batch, optimizer, schedule, activations kept, checkpoints
    findings         what Megatron-LM stops at, or passes over
    write            ranks and memory; calls the two modules below
    write_precision  the dtypes, fp32 master weights, and a scaled loss for fp16
    write_training   batch, optimizer, schedule, activations kept, checkpoints
    dialect          the record of these functions, which the registry has by its name
"""
