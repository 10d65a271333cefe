"""What checkpointed units keep for backward, in host memory instead of on the device.

    forward of unit i begins        its input's way to the host begins, on a stream of its own
    forward of unit i + 1 begins    the computation waits for that copy, and the original is let go
    backward of unit i begins       its input is here again, and that of unit i - 1 is on its way back

So a unit's forward hides a copy out, and its backward a copy in. Under full checkpointing of a transformer that takes
F / (12 h) bytes per second, for F FLOP/s and a hidden size of h: 8 GB/s at 400 TFLOP/s and 4,096, a third of what PCIe
4.0 gives. The last unit's original stays until its backward, which is what comes next.

A unit's inputs are known from its call, and autograd says through `saved_tensors_hooks` which of them it keeps. Only
what the forward itself computed is moved: weights, buffers, masks and rotary tables are alive anyway. A tensor that
several units keep is moved once.

No `record_stream`: originals and copies are held until the stream that they are used on has been made to wait for the
copy. Host memory is lent from a pool, and copies both ways use one stream, so what is written to a buffer that is lent
again comes after what is read from it. On a CPU the same copies are made at the same moments.

    host_pool              host memory that is lent to tensors, and comes back
    moved_tensors          the way between a device and host memory, and a tensor that has gone it
    offloaded_activations  what is put around units' forwards for it

Read them in that order.
"""
