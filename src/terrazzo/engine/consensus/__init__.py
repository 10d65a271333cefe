"""What ranks must have alike, what they agree on, and where they meet for it.

    loss_scale        what fp16 multiplies losses by, alike on all ranks
    hyper_parameters  the numbers in param groups, which ranks compare
    progress          how far the training has come on this rank: what must be alike at every meeting
    pass_end          where ranks meet at the end of a pass; it raises if they have not run the same
    agreement         what they agree on there: the program of the next steps, and which gradients there are
    row_exchanges     where they meet besides: before modules that exchange rows, such as experts

Read them in that order.
"""
