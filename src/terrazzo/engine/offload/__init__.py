"""What is away from the device, on the tiers `cpu` and `nvme`: where it rests, how it is updated, when it comes back.

On `cpu` it is in host memory, on `nvme` in swap files.

A step of units A, B and C, all of whose states are away, with `Offload(step="overlapped")`; time runs to the right:

    computation        forward A B C | backward C  B  A | step() | forward A   B   C  | backward C ...
    terrazzo-write                               gC gB gA                               finished gradients go out
    terrazzo-update                                              A   B   C              states are stepped
    terrazzo-read                                                   wA  wB  wC          new weights come in

Each row but the first is a thread; weights in host memory need no terrazzo-read, they are copied as a gather begins.
With "synchronous", `step()` returns behind the update of C. With "backward", updates follow their gradients: C, B, A.

What happens to one unit, and where:

    gradient   FinishedGradient.land, Store.commit                     device to `cpu` or `nvme`
    update     BackgroundUpdates.begin, or .unit_reduced in backward   background: when
               Updater.begin, then _UpdateThread on its thread         update: how, segment by segment
                 StagingBuffer                                         nvme/staging: cell by cell, reads ahead
                 step_segment                                          the optimizer's own code, see `engine.optim`
                 Sending.copy                                          sending: new weights that rest on the device
    weight     UnitWeights.gather waits for the update, then           buckets/unit_weights
               Bucket.publish, FullWeights.gather, NvmeBuffer.load     `nvme` to device, then all ranks' parts

    options      what a user can choose
    needs        what a model takes on each tier
    host         host memory: one block for states, a pool for what comes and goes
    nvme         swap files, states in them, and the buffers that these stream through
    sending      new weights on their way to the device
    store        both tiers behind one interface
    update       a thread that steps states where they rest, on the CPUs of `runtime.topology`
    background   when such updates begin, and who waits for them
    activations  what checkpointed units keep for backward, in host memory

Read them in that order.
"""
