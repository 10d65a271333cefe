"""How ranks exchange: what is sent, by which way, in which order it is summed, and when it has arrived.

From the caller to the wire, as in the gather of a unit's weights:

    Transfer(moves, label)            drives a chain: a generator that yields each collective in flight    transfer
      Collectives.all_gather          along one axis of the mesh; bytes are counted                        collectives
        NativeCollectives             NCCL, queued on streams beside the computation     collectives, comm_streams
        GlooCollectives               threads on CPU ranks; sums in the order of ranks   host/gloo, sums
          Neighbour                   of one machine: reads the other rank's memory      host/neighbours, rendezvous
          Columns                     of several machines: over the network once each    host/columns
      Handle                          the collective in flight, which advance() waits for                  transfer
    Transfer.finish()                 what the chain has returned; the computation may use it              transfer

Each exchange has a `Label` of `labels`: two that do not belong together raise instead of mixing their values.

    tags              which tags messages between two ranks have
    comm_streams      the CUDA streams that chains of collectives run on
    transfer          collectives in flight and chains of them; what is counted about them
    sums              sums whose order is promised
    failure_reports   where each rank of the mesh is as one has failed: what they leave in the store, and read there
    failed_exchanges  what is raised where one has failed: who has ended, or where each rank of the mesh is
    links             the process groups of the ranks along one axis
    control_exchanges a few numbers of each rank, compared before they are used: agreements, norms, broadcasts
    collectives       tensors and messages: calls torch.distributed, and so NCCL; counts their bytes
    host              the ways that chunks take between CPU ranks
    backends          which group gets which collectives

Read them in that order.
"""
