"""How a training loop drives the core, through what torch calls on its way.

Read pass_end, agreement and companion, where ranks meet; regions, saved, listeners, outputs and announce, what is
noticed of autograd; hooks, which connects the schedule to all of them.
"""
