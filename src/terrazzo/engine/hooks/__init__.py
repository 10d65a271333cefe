"""What torch calls while a model runs, and what it tells the schedule of that.

Read forward_hooks and backward_hooks, and hooks, which has both.
"""
