"""Hugging Face's TrainingArguments (transformers 5), as a mapping of their fields.

In reading order:

    keys              every field
    keys_earlier      what became of those of earlier versions, and of their defaults
    deepspeed_inside  the DeepSpeed document, as it is handed on
    trainer_reader    the arguments that are read: older spellings, the file of `fsdp_config`, the DeepSpeed document
    read              arguments to the neutral description; calls the two modules below
    read_parallel     what is sharded and how: `fsdp`, `fsdp_config`, `parallelism_config`, `distributed_config`
    read_loop         batch, optimizer, schedule, clipping, saving
    findings          what TrainingArguments and the Trainer refuse, or take otherwise than it looks
    write             the neutral description to arguments; calls the two modules below
    write_parallel    `fsdp_config`, `parallelism_config`, and the switches for 16 bits
    write_loop        batch, optimizer, schedule, clipping, saving
    dialect           the record of these functions, which the registry has by its name
"""
