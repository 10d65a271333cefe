"""The optimizer that a user has built, of `torch.optim` or of a class of their own. Nothing here knows of buckets.

    settings      what it has beside parameters and states: attributes, hyper-parameters, hooks around its step
    template      what it keeps for a parameter, and what of that is per element
    stepper       steps of single tensors with its own code
    probe         a tensor of a few elements, stepped to see what it keeps
    elementwise   which optimizers may run on flat shards; one that says so is held to it
    param_groups  which param group has each parameter, and which kernel steps it, as a model is sharded

Read them in that order.
"""
