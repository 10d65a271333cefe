"""What is away from the device, on the tiers `cpu` and `nvme`: where it rests, how it is updated, when it comes back.

On `cpu` it is in host memory, on `nvme` in swap files.

A step of units A, B and C, all of whose states are away, with `Offload(step="overlapped")`; time runs to the right:

    computation        forward A B C | backward C  B  A | step() | forward A   B   C  | backward C ...
    terrazzo-write                               gC gB gA                               finished gradients go out
    terrazzo-update                                              A   B   C              states are stepped
    terrazzo-read                                                   wA  wB  wC          new weights come in

Each row but the first is a thread; weights in host memory need no terrazzo-read, they are copied as a gather begins.
With "synchronous", `step()` returns after the update of C. With "backward", updates follow their gradients: C, B, A.

Two things are away, which meet in nothing but pinned host memory. States have their places from `tz.shard` on, in the
`Store`; inputs of checkpointed units are lent some for as long as autograd keeps them. Who moves what, and by which
means; streams are of CUDA:

    owner              thread           stream             through                what moves
    Store              terrazzo-write   copies_out         -                      finished gradients: out
    Updater            terrazzo-update  copies_in          staging buffers        states: from `nvme`, and back there
      Sending          the same         copies_in          cells of the store     new weights: in
    NvmeTier           terrazzo-read    copies_in          buffers of the store   weights on `nvme`: in
    FullWeights        the caller's     that of gathers    -                      weights in host memory: in
    SwapSpace          terrazzo-swap    -                  -                      blocks: to files, and back
    activations.Route  the caller's     its own            a HostPool             inputs of units: out, and in

What happens to one unit, and where:

    gradient   FinishedGradient.land, Store.save                       device to `cpu` or `nvme`
    update     BackgroundUpdates.begin, or .unit_reduced in backward   background_updates: when
               Updater.begin, then _UpdateThread on its thread         updater: how, segment by segment
                 StagingBuffer                                         nvme/staging: cell by cell, reads ahead
                 step_segment                                          the optimizer's own code, see `engine.optim`
                 Sending.copy                                          sending: new weights that rest on the device
    weight     UnitWeights.gather waits for the update, then           buckets/unit_weights
               Bucket.publish, FullWeights.gather, NvmeBuffer.load     `nvme` to device, then all ranks' parts

    options             what a user can choose
    needs               what a model takes on each tier
    host_arena          a block of host memory, as for all states
    nvme                swap files, states in them, and the buffers that these stream through
    sending             new weights on their way to the device
    store               both tiers behind one interface
    updater             a thread that steps states where they rest, on the CPUs of `runtime.topology`
    background_updates  when such updates begin, and who waits for them
    activations         what checkpointed units keep for backward, in host memory

Read them in that order.
"""
