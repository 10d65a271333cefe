"""What the engine runs on: threads, the device, memory, what the system lets a process have, and torch's own dispatch.

    calls          calls that must all be made
    weak           calls of what may be gone
    private_torch  what torch does not document and the engine uses
    compiled       what torch's compiler has made of modules
    callers        who has called what runs now
    worker         threads that do a rank's errands
    process_groups a group's backends, and how long its ranks wait
    device         devices, streams, pinned host memory
    pages          what fresh CPU memory costs
    system         what Linux says of the machine and of this process
    topology       which CPUs a rank may use, and how many threads
    overrides      calls of torch that come to a class of tensors instead

Read them in that order.
"""
