"""A run in memory: its objects, how they are made or restored, and what of them is saved.

data_share      which sequences a rank reads, and whether its sums count
dpo_reference   log-probabilities of the model before its first step, for DPO
run_progress    how far the run has come
sampling        the prompts of text samples
session         the objects of a run, and what of them goes into checkpoints
warm_kernels    loads what libraries would load at the first step
resume_session  continues from a checkpoint, and notes what differs from it
build_session   builds a session, new or from a checkpoint
"""
