"""The device mesh: its axes by name, their sizes, and the collectives along each.

    family           names of axes, and families of parameters: over which axes each sums its gradients
    meshes           how a mesh is made, and the process group of each of its axes
    activation_axes  along which axes modules of a model exchange activations, and what is counted there
    axes             what the engine asks of it: which axes span which ranks, sizes, indices, and exchanges along them

Read them in that order.
"""
