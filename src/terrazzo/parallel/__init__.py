"""The axes beside data: what a rank has of matrices that several ranks share.

It imports from the engine, never the reverse: it leaves records on a model's modules, which `tz.shard` reads.
Open to other packages:

    mesh    the mesh of ranks by the names of its axes
"""

from terrazzo.parallel.face import parallelize
from terrazzo.parallel.loss import VocabularyLoss
from terrazzo.parallel.mesh import mesh, mesh_sizes
from terrazzo.parallel.styles import Column, Embedding, Enter, Logits, Row, SplitSequence, Style, Uncut

__all__ = [
    "Column",
    "Embedding",
    "Enter",
    "Logits",
    "Row",
    "SplitSequence",
    "Style",
    "Uncut",
    "VocabularyLoss",
    "mesh",
    "mesh_sizes",
    "parallelize",
]
