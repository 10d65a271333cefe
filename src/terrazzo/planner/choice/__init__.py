"""Which setups to try, which is best, how many devices are needed, and the configuration that runs it.

Read the modules in this order:

    search           all that is tried, in which order, and by which rules most of it need not be: `search`
    tried_meshes     sizes of the axes that a request leaves open
    candidates       strategies, shard groups, checkpointing and micro-batches on one mesh
    neighbours       what lies between and beside these, of the best
    refusals         why the rest does not run, and what comes nearest
    ranking          the order of what fits
    fewest           the fewest devices on which a setup surely fits: `min_gpus`
    request_changes  what may be changed of a request that does not fit
    edits            which of these changes, or of others, are proposed
    decoder_section  the section `model` of the built-in decoder
    emit             a setup as the configuration of `terrazzo train`

The tokens per second of one candidate go through these functions:

    search                  the numbers of devices of the request, of many some                  search
      meshes                sizes of tensor, pipeline, context and expert parallelism            tried_meshes
        strategies          and the groups that each shards in                                   candidates
          modes_and_sizes   checkpointing, and micro-batches from small to large                 candidates
            memory_under    does it fit                                                          assemble
            findings        is it refused                                                        gate
            assemble        `time.tokens_per_s_per_gpu`                                          assemble
      neighbours            of what is first by then                                             neighbours
      rank_key              what surely fits first, of that what runs now, then the fastest,     ranking
                            the fewest or the cheapest
      simplest_first        within 3 % of the first the simplest takes its place                 ranking
    Frontier                `ranked`, the Pareto front and what was refused                      report.frontier

`min_gpus` asks `search` with the least memory that is allowed on each number of devices that it tries, and once more
with all that is open on the number that it answers.
"""
