"""What is done with a session, step by step.

step            an optimizer step: forward, backward and update
evaluate        validation, and samples of text
judge           judges whether a step is like those before it, and acts if it is not
due             what is due after a step
cadence         when a checkpoint is saved, also if the run is to find that out

Whether ranks compute and hold what they should:

replica_checks  when that is checked, and which checkpoints are not to be trusted afterwards
replay          computes micro-batches again on other ranks
disagreement    finds the rank that is wrong, from the answers of all
memory_checks   detects memory that changes by itself
"""
