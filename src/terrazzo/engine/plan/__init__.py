"""What is stated before anything is allocated: parameters in flat spaces, where their states rest, and what that moves.

    layout         where each parameter lies in a flat space, and which part of it a rank has
    rectangles     rectangular parts of tensors, and those that a flat range is made of
    place          a plan: over which ranks each state is split, and on which tier it rests
    precision      the dtype of every tensor
    weight_wire    what weights are sent as
    diloco         replicas that train by themselves, and their outer step
    moves          one collective or copy, and the sums of a step that these make
    bucket_spec    what follows from all of these for one bucket: its states, their memory, its moves
    bucket_memory  what a bucket allocates and frees at each event of a step
    box            the part of a parameter that a rank holds along `tp` or `ep`
    partition      which module is a unit, and which unit owns each parameter
    sharding_spec  the plan and the precision on this mesh, which all units follow

Read them in that order.

A new format of weights, on the wire a `WireFormat`, of frozen matrices at rest a `FrozenFormat`:

    its name         precision: a member; on the wire in `_GATHER_FORMATS` too, what `Precision.gather` may be
    its blocks       layout: a `BlockFormat`, which the member's `blocks` returns. On the wire of 256 elements, on which
                     `Precision.align` and `travels_in_blocks` count, with a scale in fp32 at the end
    what is sent     weight_wire: sizes follow from `blocks`. What comes in another way than blocks or packed codes is a
                     `Wire` of its own, which `BucketSpec` chooses, and a class in buckets/weight_gathers
    its codes        buckets/wire or buckets/nf4: `encode` and `decode`
    its checks       `Precision.__post_init__`; of frozen matrices sharding/packed_checks and planner/gate/engine_rules
    its key          config/sections/precision: `GatherName` or `FrozenName`; and the dialects that have such a key
    the planner      planner/setup/request: `qlora` plans with nf4; no option names what weights are gathered in
"""
