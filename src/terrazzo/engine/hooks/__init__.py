"""Hooks that torch calls while a model runs, and that drive the schedule.

Read forward_hooks and backward_hooks, and hooks, which has both.
"""
