"""The ways that chunks take between CPU ranks.

    rendezvous      how ranks of one machine get connected
    neighbours      reads the memory of ranks on the same machine
    announced_data  what goes ahead of data between machines: what they are, and how many bytes
    columns         between many machines: over the network once for each
    gloo            the collectives that take these ways, or send messages

Read them in that order.
"""
