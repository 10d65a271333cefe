"""What a user chooses: a request in plain arguments, and the setup that is made of it and checked.

A `Request` leaves open what nobody named; a `Setup` has a value for everything. Read the modules in this order:

    optimizers    what each optimizer keeps of an element
    framework     what runs a setup: Terrazzo, or another whose limits are known
    setup         `Setup`: one way of running a model
    kernels       which attention kernel runs
    choice_names  names of strategies, precisions and activation checkpointing
    checks        what cannot be, whatever the hardware
    arguments     the kind and range of every field of a request
    request       `Request`: what a user asks
    build_setup   the setup that a request means, and its devices
    assumptions   what was assumed of it, in sentences

The micro-batches of a step, of `Request("llama3-8b", 8, global_batch=32)`:

    Request           `global_batch` is a whole number above 0                                 request, arguments
    build_setup       all defaults are filled in                                               build_setup
      _mesh           8 devices are left to data parallelism                                   build_setup
      _micro_batches  32 / (1 sequence x 8 data ranks) = 4; 36 make 5, with 4 `empty_rows`     build_setup
    Setup             `micro_batches=4`, which memory, traffic and timing read                 setup
    check             begins every estimate: a whole number, which suits the pipeline          checks
"""
