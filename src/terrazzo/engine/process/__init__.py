"""The process that the engine runs in: its threads, how things end in it, and what its memory costs.

Read ending, worker, pages, in that order.
"""
