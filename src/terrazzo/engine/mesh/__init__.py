"""The device mesh: its axes by name, their sizes, and the collectives along each.

Read family, the names of axes and which of them sum whose gradients; meshes, how one is made; axes, what the engine
asks of it.
"""
