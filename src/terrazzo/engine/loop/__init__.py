"""How a training loop drives the schedule, through what torch calls on its way.

Read loss_scale, hyper_parameters and progress, what ranks must have alike; pass_end, agreement and row_exchanges, where
they meet; regions, saved, listeners, outputs and announce, what is noticed of autograd; copies, of weights whose memory
goes; tree, whether modules are still those that were sharded; backward_hooks and forward_hooks, which tell the schedule
of all of them, and hooks, which has both.
"""
