"""Tensor parallelism: ranks have parts of the same matrices.

Read styles first, how one module takes part; plans, those that models bring; reading and regions, what a plan means for
a model and whether that is a sum; cut, what is then done to it; and uses with ranks, what its modules do around their
forward. Beside these: loss, of logits in parts; scales, of 8-bit products; dropout, alike and direct, what is watched.
"""
