"""What is done with a session step by step.

step            an optimizer step, forward and backward of its micro-batches
evaluate        validation, and samples of text
judge           whether a step is like those before it, and what is done about one that is not
due             what is due after a step
cadence         how often a checkpoint is saved, where the run is to find that out

Whether ranks compute what others compute of the same data:

replica_checks  when that is checked, and which checkpoints are not to be trusted then
replay          a step that all ranks compute again, of one rank's data
disagreement    who is wrong, by the answers of all
memory_checks   whether a rank's memory changes by itself
"""
