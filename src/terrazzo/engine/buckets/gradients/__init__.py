"""The gradient of a bucket, from autograd to the optimizer.

    unreduced    as autograd brings it, parameter by parameter
    summed       a sum over ranks, at rest
    finished     summed over ranks and divided: what is done with it until a step has it
    block_sums   sums over ranks that send what they have in blocks of codes
    residuals    what such codes have lost, and the next ones make up for
    gradient     its way through these

Read them in that order.
"""
