"""torchtitan's `Trainer.Config`, as the mapping that its `save_config_file` writes.

In reading order:

    keys         every key, and what became of those of earlier versions
    read         the configuration to the neutral description; calls `read_float8`
    read_float8  the sections of versions before 0.3 for linear layers in float8
    findings     what torchtitan refuses, or what does nothing
    write        the neutral description to the configuration; calls the module below
    write_plan   the mesh and the row
    dialect      the record of these functions, which the registry has by its name
"""
