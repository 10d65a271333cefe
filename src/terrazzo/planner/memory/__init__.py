"""What the fullest rank holds at its fullest moment, term by term.

States at rest follow from places and dtypes. All else comes and goes within a step, so it is counted event by event,
and the moment at which most is held is the answer. Read the modules in this order:

    states         weights, gradients, master weights and moments at rest
    block_setting  what of a setup the activations of a block depend on
    kept_by_attention  what attention keeps, by the code that runs: its scores too, or not
    activations    what autograd keeps of a block, by formulas, and what each checkpointing policy computes again
    logits         what it keeps of logits and loss
    tiers          states away from the device: what stays on it for them, what host memory and disks hold
    unit_events    what a unit adds and takes off at each event of a step: the sum over its buckets
    step_settings  what a walk is asked, and its answer: `StepUnit`, `StepSettings`, `Peak`
    walk_state     what is held at a moment of a walk, and what is here of each unit
    walk           the events of a step in order, and the fullest moment
    outer_memory   what an outer step of replicas that train by themselves holds
    matrices       what updates of whole matrices hold, send and compute
    overheads      the allocator's reserve, the device's context, communicators, and the upper bound
    peak           all of these for one setup: `memory_of`
    trace          activations of a model that is there, from its operators run by their shapes alone
    replay         the engine's own schedule over such a trace: `memory_of_trace`

The gathered weights of a rank go through these functions:

    memory_of                          every rank along pp that stands for itself or others      peak, layout.placement
      rank_terms                      the terms of one rank along pp                          peak
        rank_peak                     its units, and the settings of its step                   peak
          placed_units                 which units it has, and how each is placed                layout
          unit_events                  once for each kind of unit                                unit_events
            buckets                    what is split, gathered and summed as one                 layout.buckets
            bucket_memory.gather       its event adds them, `rest_between` and `release` free    engine.plan
        peak_of                      gathers ahead, rests and releases, in the step's order    walk
            FullestMoment.apply        adds each change, and keeps the parts of the largest sum  walk_state
        Term("gathered", ...)          the part of that moment                                   peak
      fullest_memory                   the terms of the fullest rank, with what lies around      peak, overheads, tiers

With llama3-8b under zero3 in bf16, one sequence of 4,096 tokens a rank, that moment is the head's backward: the root
(2.10 GB) and one block (0.44 GB) are whole, so 2.54 GB.

How many bytes a state has is written once, in `bucket_bytes`. What each event of a step allocates and frees of it is
written once, in `bucket_memory`; both are in `engine.plan`. What an update of whole matrices takes is counted once, by
`dry_run_matrices`. What is written twice, and which test holds both together, is in docs/concepts/planner.md.

The engine's `Schedule` is the code that runs, so what is counted in its order is what a run does. A search asks for
thousands of setups, for which it is too slow, and has `walk`.

    who                      counts                                        in whose order       who asks
    engine dry_run.step      transient peak and traffic                    engine's `Schedule`  bill, promise
    engine dry_run.bill      states, and that transient peak               engine's `Schedule`  estimate, promise
    planner walk             transients, gradients, activations, logits,   its own: equal       peak, so every plan
                             and what the update takes                     units at once        and every search
    planner replay           as dry_run.step, with sums of gradients and   engine's `Schedule`  train configurations
                             activations as traced                                              on CPUs

The engine's counts have no activations. The tests compare with them the walk without these,
`rank_peak(..., states_only=True)`; what is traced is compared with the memory of real steps.
"""
