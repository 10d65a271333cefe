"""Hugging Face Accelerate's YAML, as `accelerate launch --config_file` reads it.

In reading order:

    keys                every key, with the default that `accelerate launch` gives it
    accelerate_reader   the document that is read: prefixes that may be left out, and keys that are ignored in silence
    read                what shards, and on which engine; calls the two modules below
    read_fsdp           `fsdp_config` and `parallelism_config`
    read_deepspeed      `deepspeed_config`, as the DeepSpeed document that Accelerate's plugin makes of it
    launch_environment  the same document from a rank's environment and plugin objects
    findings            what Accelerate refuses, or takes otherwise than it looks
    write               which engine the YAML starts; calls the three modules below
    write_fsdp          `fsdp_config` and `parallelism_config`
    write_deepspeed     `deepspeed_config`
    write_replicas      plain data parallelism
    dialect             the record of these functions, which the registry has by its name
"""
