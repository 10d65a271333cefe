"""A run in memory: all that it has, opened or taken up, and what is saved of it.

data_share      which sequences a rank reads, and what of its sums counts
dpo_reference   log-probabilities of the model before its first step, for DPO
run_progress    how far it has come
sampling        what samples of its text go on from
session         the objects of a run, and what a checkpoint has of them
warm_kernels    what libraries load at a first step, loaded before it
resume_session  a session that goes on from a checkpoint, and what differs from it
build_session   a session built, or taken up from a checkpoint
"""
