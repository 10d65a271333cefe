"""The full weights of a bucket: what modules compute with.

    full_memory      their memory, which comes and goes under the parameters
    block_message    weights on their way in blocks of codes
    weight_gathers   the way that they come, one for each thing that weights are sent as
    full             their life in a step: gathered, installed, resharded between forward and backward, released

Read them in that order.
"""
