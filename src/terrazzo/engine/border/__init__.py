"""The border to user code: what a user may do with parameters and modules of a sharded model, and what is refused.

Read `parameter` and `edits` first. `tools/border.py` says all of it, act by act and moment by moment: a test does it,
and a page of the documentation shows it.
"""
