"""One state of a bucket at rest on this rank: its range of a flat space, on whatever tier it is.

    buffer          `Resting`, what can be asked of a state; `Buffer`, one in memory, which moves between places
    coded           `CodedState`, one in blocks of codes: what an optimizer keeps in 8 bits, frozen weights in 4
    moment_states   `MomentStates`, what the optimizer keeps for each element, where the bucket has the memory of it
    with_remainder  `WithRemainder`, master weights in 32 bits whose upper half are weights in bf16
    counted_once    of elements that several ranks have, which copy counts: in sums, in norms, in checkpoints

Read them in that order.
"""
