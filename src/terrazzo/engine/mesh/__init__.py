"""The device mesh: its axes by name, their sizes, and the collectives along each.

    family  the axes' names, and families of parameters: over which axes each sums its gradients
    meshes  how a mesh is made, and the process group of each of its axes
    axes    what the engine asks of it: sizes, this rank's index, `along(axis)` for the collectives of one axis

Read them in that order.
"""
