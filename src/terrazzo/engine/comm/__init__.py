"""How ranks exchange: what is sent, by which way, in which order it is summed, and when it has arrived.

Read label, comm_streams, traffic, transfer, sums, collectives, in that order; then rendezvous, neighbours and columns,
the ways that chunks take between CPU ranks, and gloo, which takes them. backends says which group gets which; tally
counts, phases and times say where a step's time goes, and a recorder is called with all of it as it happens.
"""
