"""Which setups to try, which is best, how many devices are needed, and the configuration that runs it.

Read the modules in this order:

    candidates    meshes, strategies, checkpointing and micro-batches that a request leaves open
    ranking       the order of what fits
    search        all candidates estimated: `search`
    fewest        the fewest devices on which a setup surely fits: `min_gpus`
    edits         the smallest changes with which a setup fits
    decoder_section  the section `model` of the built-in decoder
    emit          a setup as the configuration of `terrazzo train`

The tokens per second of one candidate go through these functions:

    search                       the numbers of devices of the request, of many some                    search
      meshes, strategies         what may be tried on it                                                candidates
      try_strategy               states alone too large: refused, the rest is not estimated             search
        modes_and_sizes          checkpointing, and micro-batches from small to large                   candidates
        memory_under             does it fit                                                            assemble
        findings                 is it refused                                                          gate
        assemble                 `time.tokens_per_s_per_gpu`; where they fall, no larger one is tried   assemble
      rank_key                   what surely fits first, of that what runs now, then the fastest,       ranking
                                 the fewest or the cheapest
      simplest_first             within 3 % of the first the simplest takes its place                   ranking
    Frontier                     `ranked`, the Pareto front and what was refused                        report.frontier

`min_gpus` asks `search` with the least memory that is allowed on each number of devices that it tries, and once more
with all that is open on the number that it answers.
"""
