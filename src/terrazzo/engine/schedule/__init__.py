"""When what is in memory moves: gathers, releases and reductions, in an order that all ranks share.

Read order, what ranks agree to do; runnable, of what; gathered and reductions, what is here and what is under way;
forward and backward, the passes along the order; straying, what comes elsewhere; schedule, which makes the passes;
pipeline, which runs several micro-batches at once.
"""
