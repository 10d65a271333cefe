"""The border to user code: what a user may do with parameters and modules of a sharded model, and what is refused.

`table` says it, object by object and moment by moment. Read `parameter` and `edits` next.
"""
