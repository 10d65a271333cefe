"""Channels of which each rank has a part, from a `colwise` to a `rowwise`: followed through a forward.

There `softmax(-1)`, `mean(-1)` or a norm would be of this rank's channels alone, and `flip(-1)` or the halves of a
fused matrix other channels than of the whole, without an error. So first forwards are watched:

1. What a `colwise` returns is marked (`channel_marks`) with the dim that ranks have in parts: `ChannelCut` (`cut_dim`).
2. Each function of torch that is given such a tensor comes to the watch (`channel_parts`), which asks the one table of
   rules (`rule_table`) for its name, or what was `declared` of it. A rule says where the dim is in each result, or
   raises `Mixed`: of the whole the function makes other than of ranks' parts, side by side.
3. A function without a rule runs with its operators watched (`elementwise`): all must compute element by element.
4. Where a view may have made heads of one dim or of another (`split_views`), both are followed, and both must be right.
5. `Mixed` is raised to the user at once if the result needs gradients. Otherwise it may be for a log: the tensor is
   marked, and refused where the model computes with it and with channels, returns it, or has ranks exchange it.
6. A `rowwise` checks that it is given channels in the order in which a `colwise` has returned them.
7. What has come by a way that is not seen (views that were written to, `vmap`, scripts, kernels) is refused by its
   memory, or by its graph.

The rules of the table, by what functions do:

    along_dims    compute along dims: reductions, norms, sorts, pools, losses
    moved_dims    give dims another order, take parts of them, or put tensors together
    places        read and write by places
    products      add up products: of matrices, of attention
    declared      are not torch's: what `tz.parallel.declare` says of them
"""
