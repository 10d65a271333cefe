"""One state of a bucket at rest on this rank: its range of a flat space, on whatever tier it is.

    buffer   `Resting`, what can be asked of a state; `Buffer`, one in memory, which moves between places
    narrow   `NarrowState`: what an optimizer keeps for each element in 8 bits, opened in fp32
    packed   `PackedWeight`: frozen weights in 4 bits, and how they are decoded where they are gathered

Read them in that order.
"""
