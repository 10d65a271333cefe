"""Sums, norms and the like of tensors that ranks hold in parts, as one number on every rank.

    measures  how each is made of the parts
    measured  parameters at rest, and finished gradients, measured so

Read them in that order.
"""
