"""torchtitan's `Trainer.Config`, as the mapping that its `save_config_file` writes.

In reading order:

    keys               every key
    keys_earlier       those of versions before 0.3: what each is called today, and rows of what is gone
    torchtitan_reader  the document that is read: older names
    stored_dtypes      the dtypes that follow from `training.dtype`
    read               the configuration to the neutral description; calls the module below
    read_earlier       optimizer, recomputation and float8 as versions before 0.3 said them
    findings           what torchtitan refuses, or what does nothing
    write              the neutral description to the configuration; calls the module below
    write_plan         the mesh and the row
    dialect            the record of these functions, which the registry has by its name
"""
