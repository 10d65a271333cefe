"""`deepspeed.runtime`: what scripts take from inside DeepSpeed."""
