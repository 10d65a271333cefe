"""What numbers look like in fewer bits than any dtype has. Each format is one object: its sizes, its codes, and the
memory that coding takes. Nothing here knows of ranks, buckets or plans.

    block_format         blocks of elements: their sizes, and what each format is asked
    sent_blocks          weights and gradients on the wire, in 8 or 4 bits
    nf4                  frozen weights at rest, in 4 bits
    state_blocks         what an optimizer keeps for each element, in 8 bits
    format_names         every format by its name in a `Precision`: one row for each
    stochastic_rounding  to bf16, by bits that all ranks have alike
    bf16_remainder       what rounding to bf16 leaves out of 32 bits, in 16

A new format is a module here and a row in `format_names`:

    the module    a `BlockCodes`, which says what has to hold of it: sizes, `encode`, `decode`, and in `coding_bytes`
                  what decoding takes; of an optimizer's states a `StateBlocks`
    the row       `FrozenFormat`, `WireFormat` or `StateFormat`: its name and that object; of what is sent, also
                  `WEIGHT_FORMATS` or `GRADIENT_FORMATS`
    its key       config/sections/precision, which is read without torch: the name; a test compares it to the rows
    its oracle    tests/engine/four_bits or narrow, the same in plain PyTorch; tests go through all rows

Layout, sizes on the wire, bills, the dry run, the planner and the checks ask the object; `tools/reference_pages` writes
its pages anew. What weights are sent as may also differ in the way that they come, such as in two messages: that is a
`WeightWire` of its own in plan/weight_wire, which says what it means for memory and for values, and a class in
buckets/weights/weight_gathers, which moves it. A wire that has none is refused as a `Unit` is made.
"""
