"""The axes beside data: what a rank has of matrices that several ranks share, and of sequences.

    mesh       the mesh of ranks by the names of its axes
    context    sequences that ranks share, and attention over them; read chunks first, then tiles with kernels, which
               compute, and modes with exchanges, which bring together
    sharing    how a model is told, with registry for models of `transformers`

Imports from the engine, never the reverse: it leaves records on a model's modules, which `tz.shard` reads.
"""

from terrazzo.parallel.chunks import Balance, Chunks
from terrazzo.parallel.context import MODES, Context, Mode
from terrazzo.parallel.mesh import mesh, mesh_sizes
from terrazzo.parallel.registry import check_config
from terrazzo.parallel.sharing import context_of, share_sequences, whole_sequences
from terrazzo.parallel.tiles import Sight

__all__ = [
    "MODES",
    "Balance",
    "Chunks",
    "Context",
    "Mode",
    "Sight",
    "check_config",
    "context_of",
    "mesh",
    "mesh_sizes",
    "share_sequences",
    "whole_sequences",
]
