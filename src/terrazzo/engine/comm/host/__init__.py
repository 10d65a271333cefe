"""The ways that chunks take between CPU ranks.

rendezvous   how ranks of one machine get connected
neighbours   reads the memory of ranks on the same machine
columns      between many machines: over the network once for each
gloo         the collectives that take these ways, or send messages
"""
