"""What is stated before anything is allocated: parameters in flat spaces, where their states rest, and what that moves.

    layout             integer arithmetic: where each parameter lies in a flat space, and which part of it a rank has
    rectangles         rectangular parts of tensors, and those that a flat range is made of
    place              a plan: over which ranks each state is split, on which tier it rests; presets, shares of units
    diloco             replicas that train by themselves, and their outer step
    precision          in which dtype or format each state and message is, how it is rounded, and loss scaling
    weight_wire        what weights are sent as, and what that means for memory and values
    error_feedback     residuals, which codes of gradients leave: the formula, and which ranks have which
    state_names        names in checkpoints of states of which several ranks have their own
    moves              one collective or copy, and the sums that these make in each kind of backward pass
    gradient_wire      what gradients are sent as, and the moves that sum them
    bucket_spec        what follows from all these for one bucket, without tensors: its states, their memory, its moves
    bucket_memory      what a bucket allocates and frees at each event of a step
    box                the part of a parameter that a rank holds along `tp` or `ep`
    absent_parameters  what stands for parameters of stages that other ranks run: drawn here too, then dropped
    unit_choice        which modules are units
    partition          which unit owns each parameter
    packed_members     which frozen matrices of a unit are kept in 4 bits
    sharding_spec      the plan and the precision on this mesh, which all units follow

Read them in that order. `layout` and `rectangles` are arithmetic. What users state is in `place`, `diloco` and
`precision`; what is sent because of it, in `weight_wire` to `gradient_wire`. `bucket_spec` and `bucket_memory` say what
follows for one bucket, and the others of which parameters buckets are made.

A new format of weights, gradients or an optimizer's states: `terrazzo.engine.formats` says what it takes.
"""
