"""Terrazzo's own YAML, as `terrazzo train` takes it.

In reading order:

    paths                the key for each neutral setting, for reading and writing
    keys                 the keys of the schema, and the sections that may be one word
    optimizer_arguments  what optimizers take, and their defaults, by their classes
    read                 YAML to the neutral description
    findings             what `terrazzo train` refuses of a plan with its tiers
    terrazzo_draft       the document that is written: what is taken over as it is
    write                the neutral description to YAML; calls `write_precision`
    write_precision      the precision section, written
    dialect              the record of these functions, which the registry has by its name
"""
