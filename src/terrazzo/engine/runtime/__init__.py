"""What the engine runs on: threads, the device, memory, the CPUs that a rank may use, and torch's own dispatch.

    calls          several calls of which none is left out; the one that does nothing
    weak           calls of what may be gone
    method_replacement what a module has in place of a method, which does not hold it
    private_torch  what torch does not document and the engine uses, looked up once; a torch without it is named
    compiled       what torch's compiler has made of modules
    dtensors       torch's DTensors, told from plain tensors without an import
    callers        who has called what runs now, by Python's stack
    worker         threads that work for a rank in the background
    process_groups what torch knows of a process group: backends, timeout
    device         streams, events, pinned memory, the current device; alone says `torch.cuda`
    pages          large pages for big CPU buffers, and what fresh memory costs
    topology       which CPUs a rank may use, and how many threads an update should have
    overrides      calls of torch that come to a class of tensors instead: what they ask, are called, and are given

Read them in that order.
"""
