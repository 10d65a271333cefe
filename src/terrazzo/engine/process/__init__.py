"""The process that the engine runs in: its threads, its device, its memory, and what the system lets it have.

Read calls, weak, callers, worker, device, pages, system, in that order.
"""
