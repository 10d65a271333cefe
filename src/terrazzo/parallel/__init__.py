"""The axes beside data: what a rank has of matrices that several ranks share.

    mesh    the mesh of ranks by the names of its axes

Imports from the engine, never the reverse: it leaves records on a model's modules, which `tz.shard` reads.
"""

from terrazzo.parallel.mesh import mesh, mesh_sizes

__all__ = ["mesh", "mesh_sizes"]
