"""What several dialects say alike: `fsdp`, `fsdp_policy`, `deepspeed`, `accelerate`, `rows` that a library lacks."""
