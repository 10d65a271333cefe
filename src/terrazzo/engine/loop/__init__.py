"""How a training loop drives the schedule, through what torch calls on its way.

Read loss_scale and progress, what ranks must have alike; pass_end, agreement and companion, where they meet; regions,
saved, listeners, outputs and announce, what is noticed of autograd; tree, whether modules are still those that were
sharded; hooks, which connects the schedule to all of them.
"""
