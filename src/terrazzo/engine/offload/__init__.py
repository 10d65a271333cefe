"""What is away from the device, in host memory or in files: where it rests, how it is updated, when it comes back.

A step of units A, B and C, all of whose states are away, with `Offload(step="overlapped")`; time runs to the right:

    computation        forward A B C | backward C  B  A | step() | forward A   B   C  | backward C ...
    terrazzo-write                               gC gB gA                               finished gradients go out
    terrazzo-update                                              A   B   C              states are stepped
    terrazzo-read                                                   wA  wB  wC          new weights come in

Each row but the first is a thread; weights in host memory need no terrazzo-read, they are copied as a gather begins.
With "synchronous", `step()` returns behind the update of C. With "backward", updates follow their gradients: C, B, A.

What happens to one unit, and where:

    gradient   FinishedGradient.land, Store.commit                     device to host memory or file
    update     BackgroundUpdates.begin, or .unit_reduced in backward   background: when
               Updater.begin, then _UpdateThread on its thread         update: how, segment by segment
                 StagingBuffer                                         staging: files only, cell by cell, reads ahead
                 step_segment                                          the optimizer's own code, see `engine.optim`
                 Sending.copy                                          sending: new weights that rest on the device
    weight     UnitWeights.gather waits for the update, then           buckets/unit_weights
               Bucket.publish, FullWeights.gather, DriveBuffer.load    file to device, then all ranks' parts

Read options and needs; host, disk (on disk_file and disk_folder), drive and store, where states rest; then staging,
sending, update and background, how they are updated, by threads on the CPUs of `runtime.topology`. activations is about
what checkpointed units keep for backward.
"""
