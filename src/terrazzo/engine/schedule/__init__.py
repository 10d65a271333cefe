"""When what is in memory moves: gathers, releases and reductions, in an order that all ranks share.

Read order, what ranks agree to do; runnable, of what; reductions and gathered, what is under way and what is here;
schedule, which runs it; stages, which runs several micro-batches at once.
"""
