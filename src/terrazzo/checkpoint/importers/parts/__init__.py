"""What importers of several formats are made of: pickles that are not run, blocks of tensors, names, optimizers.

In reading order:

    values      tensors that stay in their files until a range is asked for
    tree        nested mappings and lists with `Values` where tensors are
    paths       files that a checkpoint names: only those in its own folder are opened
    unpickle    pickles, as far as they describe plain values and dense tensors; nothing is run
    archive     archives of `torch.save` inside of a file
    state_dict  weights, an optimizer's state and plain values of a training program
    numbering   names for parameters that an optimizer only numbers
    optimizer   state dicts of torch optimizers: numbered, by name, or flattened
"""
