"""How long a step takes, and what bounds it.

A step takes what the slowest rank along pp takes, the one that ends last: its computation, communication that nothing
hides, what it waits for the other ranks, update; where that waits for all, the longest update of any rank.
Each is a term in seconds, and the terms add up to the step. Read the modules in this order:

    rates          what a device reaches of its peaks
    products       FLOPs of a block's matrix products, and what is lost to their shapes
    attention      the seconds of a block's attention, by the kernel that runs it
    compute        `Seconds` of one block and micro-batch, of the head, and bytes of the optimizer's step
    overlap        how much communication computation hides
    update         how much of an update away from the device is hidden
    timeline       when each stage of a pipeline runs what, for terms and pictures alike
    rank_update    the optimizer's step of one rank along pp
    pipeline_rank  one rank along pp: what its stages take, and its terms
    pipeline_step  all ranks along pp: the terms of the one that ends last, and what it waits for the others
    core_turns     these terms, and turns of ranks that share a host's cores
    calibration    what was measured on a device, kept between runs
    measured       what a measurement changes in the terms, and how one is fitted
    step           the terms as `TimeFigures`: `time_of`

The matrix products of a micro-batch go through these functions:

    time_of                          one step                                                     step
      PipelineStep.slowest           the rank along pp that ends last                             pipeline_step
        block_seconds                one block and one micro-batch                                compute
          block_products             FLOPs of forward and backward, with what shapes lose         products
          sustained_rate             FLOP/s that the device keeps up                              rates
          Seconds.matmul             the first over the second                                    compute
        Seconds.at                   times the measured pace, or 1                                compute, measured
        PipelineRank.passes          forward and backward of all blocks, with what they wait for  pipeline_rank
        PipelineRank.busy_s          the same for all micro-batches                               pipeline_rank
      PipelineRank.pass_terms
        Term("matrix products")      of all blocks, the head and all micro-batches: time.matmul   pipeline_rank
        block_exposure               the passes hide gathers and reductions: less of time.data    overlap
      PipelineStep.terms
        StageSchedule.ends_of_ranks  when its last backward has ended, less `busy_s`: time.bubble timeline
      TimeFigures                    the sum, tokens per second, MFU and the largest bound        step

With a measurement `measured_step` makes the `PipelineStep`. Of a device without known rates nothing can be
said without one, and with one `line_terms` counts FLOPs at the measured rate.
"""
