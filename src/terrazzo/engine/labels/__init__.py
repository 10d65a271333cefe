"""What each exchange between ranks is for: in its message, so that two which do not belong together raise.

Ranks issue their exchanges in one order that all of them share (see `schedule.order`). Should they ever not, chunks of
different units could meet, of the same size and without an error. So each exchange has a label: in its messages, or
where those have no room for it (NCCL) in a checksum that ranks compare when they meet (see `consensus.pass_end`).

    rank_places     where each rank is in what all run, as errors say it
    numbered        what labels have numbers of, such as units, and the names that a rank knows of these
    declared_calls  calls that every rank makes together, each declared where it is made
    purposes        why something is exchanged: the words for it, and what errors ask for
    label           purpose, model and numbers of one exchange, in 63 bits; and that of the exchange begun now

Read them in that order.
"""
