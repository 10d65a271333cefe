"""The gradient of a bucket, from autograd to the optimizer.

    unreduced    as autograd brings it, parameter by parameter
    summed       a sum over ranks, at rest
    finished     summed over ranks and divided: what is done with it until a step has it
    block_sums   sums over ranks that send what they have in blocks of codes
    residual     what such codes have lost, which error feedback adds to the next ones
    gradient     its way through these

Read them in that order.
"""
