"""What is in memory: the states of the parameters that move together, and what is done with them.

Who has what, from a unit down to memory:

    Unit                       what is gathered and reduced together, a transformer block           unit
      UnitWeights              its weights, and the moves that are under way for them               unit_weights
      Bucket                   one flat space of it; a `BucketSpec` says which states exist         bucket
        weight, master         at rest, whatever the tier: a `Resting`, such as a `Buffer`          buffer
                               of frozen weights in 4 bits, a `PackedWeight`                        packed, nf4
        moments                where they are away from the device, or a `NarrowState` of 8 bits    narrow, codec
        FullWeights            what modules compute with; parameters are views of it                full
          FullMemory           its memory, which comes and goes                                     full_memory
          WeightGather         the way that it comes, by what is sent: a dtype, blocks, codes       weight_gathers, wire
          Guard                parameters whose values are not here refuse to be read               parameter
          Edits                what users have written into them                                    edits, aliases
        Gradient               from autograd to the optimizer                                       gradient
          UnreducedGradient    as autograd brings it                                                unreduced
          SummedGradient       the sum of earlier micro-batches                                     summed
          FinishedGradient     summed over ranks and divided; a `SummedGradient`, once it is there  finished

The life of one bucket under `zero3`:

    tz.shard             Bucket.build                        states are allocated and filled; parameters become views
    forward begins       FullWeights.gather, then .install   full weights come, and can be read
    forward ends         FullWeights.rest_between            all but what `between` names is gone
    backward begins      FullWeights.gather, then .install   they come once more
                         Gradient.accumulate                 parameter by parameter, into the UnreducedGradient
    backward ends        FullWeights.release                 they go
                         Gradient.reduce                     over ranks, into the FinishedGradient
    optimizer.step()     Gradient.handed_over                read by whatever updates master
                         Bucket.publish                      weight follows master; next: forward begins
    zero_grad()          Bucket.zero_grad                    the gradient goes

Read buffer, what can be at rest, and where; full_memory, weight_gathers and full, a weight's way; unreduced, summed,
finished and gradient, a gradient's; bucket, unit_weights and unit, which have these; then parameter, edits and aliases,
what users see and do. The rest are formats: codec, narrow and rounding, states in 8 bits; nf4 and packed, frozen
weights in 4; wire, what is on its way in 8 or 4, and block_sums, sums of gradients that come so.
"""
