"""The process that the engine runs in: its threads, its device, its memory, and its control groups.

Read worker, device, pages, control_groups, in that order.
"""
