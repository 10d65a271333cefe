"""What is stated before anything is allocated: flat spaces, where the states in them rest, and what that moves.

    layout          integer arithmetic: where each parameter lies in a flat space, and which part of it a rank has
    place           a plan: over which ranks each state is split, on which tier it rests; presets, shares of units
    diloco          replicas that train by themselves, and their outer step
    precision       in which dtype or format each state and message is, how it is rounded, and loss scaling
    weight_wire     what weights are sent as, and what that means for memory and values
    error_feedback  residuals, which codes of gradients leave: the formula, and which ranks have which
    moves           one collective or copy, and the sums that these make in each kind of backward pass
    gradient_wire   what gradients are sent as, and the moves that sum them
    kept_weights    what stays of full weights from forward to backward, where the plan does not say it alone
    bucket_spec     what follows from all these for one bucket, without tensors: its states and its moves
    bucket_bytes    how many bytes it has of each, at rest and in a step
    bucket_memory   at which events of a step these are allocated and freed
    sharding_spec   the plan and the precision on this mesh, which all units follow

Read them in that order. `layout` is arithmetic. What users state is in `place`, `diloco` and `precision`; what is sent
because of it, in `weight_wire` to `gradient_wire`. `bucket_spec` to `bucket_memory` say what follows for one bucket,
and the folder `partition` of which parameters buckets are made.

A new format of weights, gradients or an optimizer's states: `terrazzo.engine.formats` says what it takes.
"""
