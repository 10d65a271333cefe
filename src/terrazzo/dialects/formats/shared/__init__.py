"""What several dialects say alike.

plan_rows          rows of the table for libraries that lack some: the nearest row, and two axes that are one
launcher           how many ranks on how many machines: in keys, or as the launcher is told
batch_words        sizes of a batch that follow from the others
class_defaults     what an optimizer's class takes where nothing is said
saving_words       a folder in place of one state dict
schedule_words     a warm-up in steps, and what it means that rates lag behind
tiers              what offload asks for, to a library with one tier for each state
fsdp_words         torch's names of dtypes and strategies
fsdp_arguments     units, meshes and offload, as FSDP's arguments say them
fsdp_policy        mixed precision as torch's two policies have it
deepspeed_words    stages and offload, for DeepSpeed's own document and Accelerate's keys for it
trainer_defaults   what TrainingArguments have where they are not given, also for "auto" in DeepSpeed's
accelerate_stack   axes of what Accelerate runs, for its own document and the Trainer's
accelerate_dtypes  dtypes of the same
"""
