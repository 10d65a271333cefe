"""Memory: the states of the parameters that move together, and what is done with them.

    resting        one state at rest, whatever the tier
    parameters     what users see of parameters, and do to them
    gradients      a gradient, from autograd to the optimizer
    weights        full weights, which come and go
    bucket_layout  one flat space of a unit, before anything is allocated: its parameters, and where each lies
    bucket         the same in memory: weight, master weight, moments, and the above
    take_over      what users have written into its weights, or given them as `data`: taken over, or refused
    unit_layout    the buckets of one module, before anything is allocated
    bucket_groups  which parameters of a module share a bucket, and all units laid out so
    unit_weights   the weights of all buckets of a unit, and the moves that may be under way for them
    unit           the buckets of one module in memory

Who has what, from a unit down to memory:

    Unit                     what is gathered and reduced together, a transformer block         unit
      UnitWeights            its weights, and the moves that are under way for them             unit_weights
      Bucket                 one flat space of it; a `BucketSpec` says which states exist       bucket
        weight, master       at rest, whatever the tier: a `Resting`, such as a `Buffer`        resting/buffer
                             of frozen weights in 4 bits, a `CodedState`                        resting/coded
        MomentStates         where they are away from the device, or a `CodedState` of 8 bits   resting/moment_states
        FullWeights          what modules compute with; parameters are views of it              weights/full
          FullMemory         its memory, which comes and goes                                   weights/full_memory
          WeightGather       the way that it comes, by what is sent: a dtype, blocks, codes     weights/weight_gathers
          Guard              parameters whose values are not here refuse to be read             parameters/at_rest
          Edits              what users have written into them                                  parameters/edits
        Gradient             from autograd to the optimizer                                     gradients/gradient
          UnreducedGradient  as autograd brings it                                              gradients/unreduced
          SummedGradient     the sum of earlier micro-batches                                   gradients/summed
          Residual           what codes of it have lost, which is added to the next ones        gradients/residual
          FinishedGradient   summed over ranks and divided: a `SummedGradient` again            gradients/finished

The life of one bucket under `zero3`:

    tz.shard             BucketLayout.of                     checked, and billed: nothing is allocated
                         Bucket                              states are allocated and filled; parameters become views
    an optimizer comes   MomentStates.make_room              what it keeps, where the bucket has the memory of it
    forward begins       FullWeights.gather, then .install   full weights come, and can be read
    forward ends         FullWeights.rest_between            all but what `between` names is gone
    backward begins      FullWeights.gather, then .install   they come once more
                         Gradient.accumulate                 parameter by parameter, into the UnreducedGradient
    backward ends        FullWeights.release                 they go
                         Gradient.reduce                     over ranks, into the FinishedGradient
    optimizer.step()     Gradient.handed_over                read by whatever updates master
                         Bucket.publish                      weight follows master; next: forward begins
    zero_grad()          Bucket.zero_grad                    the gradient goes

What a parameter is at each of these moments, its class and its memory: the docstring of `parameters`.

Read resting, weights and gradients; then bucket, unit_weights and unit, which have these, and parameters. What is in
fewer bits than any dtype has asks its format: `terrazzo.engine.formats`.
"""
