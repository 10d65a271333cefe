"""The process that the engine runs in: its threads, its memory, and its control groups.

Read worker, pages, control_groups, in that order.
"""
