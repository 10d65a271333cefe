"""Context parallelism: ranks have parts of the same sequences.

Read chunks first, which rank holds what; tiles with kernels, which compute; modes, which bring ranks together; context,
the face of these; and sharing with registry, how a model is told.
"""
