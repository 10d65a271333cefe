"""A dry run of a step: memory and traffic, known before anything is allocated or sent.

The real schedule runs; its units count bytes. So what it says is what the engine does, collective by collective:

    counting     `CountingUnit` in place of `Unit`: each gather, release and sum as bytes in a ledger
    step         the schedule of a step, run on such units
    outer_steps  the exchanges of outer steps of replicas that train by themselves, as `replicas` says their bytes
    bill         `MemoryBill`: states by shape, place and dtype, and the peak of such a step
    promise      both, asked of a sharded model by the number of micro-batches

Read them in that order.
"""
