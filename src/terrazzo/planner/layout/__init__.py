"""Which rank has what of a model: stages of a pipeline, what ranks split of each state, and the buckets that follow.

Shapes and ranks alone, from which memory, traffic and timing are counted. Read the modules in this order:

    stages         which units each rank along pp has, and how many micro-batches are in flight there
    placement      which ranks split each state and on which tier it lies; which ranks along pp stand for others
    buckets        a unit's tensors as the engine's own `BucketSpec`, with sizes alone

The weights of a block on one rank go through these functions:

    placed_units       the units of a rank along pp                                      placement
      units_on         which of the model's they are                                     stages
      placement_of     the ranks that split each state, and the tiers of a unit          placement
    buckets            what of a unit is split, gathered and summed as one               buckets
      parts_along_tp   tensors of which ranks along tp have parts, and those they share  model.shapes
      BucketSpec       elements with their padding; bytes of each state: `bucket_bytes`  engine.plan
"""
