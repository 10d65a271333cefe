"""DeepSpeed's JSON: read with the defaults of a release, and written for one.

In reading order; each `read_*` module reads one part of a document, each `write_*` module writes one:

    versions          what changed between releases: defaults that moved, and features that are gone
    keys              a row for every key, joined from the three modules below; older spellings, removed keys
    keys_core         rows of batch, numbers, optimizer, schedule, parallelism and checkpoints
    keys_zero         rows of `zero_optimization` and of its NVMe tier
    keys_tools        rows of compiler passes, mixture-of-experts, data library, monitors and tools
    auto              the values that Hugging Face's Trainer and Accelerate put in place of "auto"
    deepspeed_reader  the document that is read: spellings, "auto", removed and unknown keys
    read              calls the four modules below, in turn
    read_zero         the row of the table, the mesh, and what is off the device
    read_precision    the dtype of every tensor
    read_training     batch sizes, optimizer, clipping, activation checkpointing, compilation
    read_schedule     the learning-rate schedule
    findings          combinations that DeepSpeed refuses, or takes otherwise than they look
    deepspeed_draft   the document that is written: keys only where DeepSpeed's default differs
    write             calls the three modules below, in turn
    write_zero        the stage nearest to a row, degrees and tiers
    write_precision   `bf16`, `fp16` or `torch_autocast`, and what differs from what these bring
    write_training    batch sizes, optimizer, schedule and clipping
    dialect           the record of these functions, which the registry has by its name
"""
