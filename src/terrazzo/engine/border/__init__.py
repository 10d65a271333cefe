"""The border to user code: what may be done with a sharded model, and what it answers a loop that knows nothing of it.

Read module and optimizer, the classes of the model and of what steps it; everywhere, calls of all ranks; loading, hooks
around state dicts; unattached, steps of other optimizers; shown and stand_in, `parameter.grad`; measures and measured,
norms and sums of what no rank has whole; and methods, which run as a forward does. Parameters themselves, and what is
written into them, are in `buckets/parameter` and `buckets/edits`; modules that come later, in `autograd/module_tree`.
`tools/border.py` says all of it, act by act and moment by moment: a test does it, and a page of the documentation
shows it.
"""
