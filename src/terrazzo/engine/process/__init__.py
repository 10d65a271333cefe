"""The process that the engine runs in: its threads, how things end in it, its memory, and its control groups.

Read ending, worker, pages, control_groups, in that order.
"""
