"""The axes beside data: what a rank has of matrices that several ranks share, and of sequences.

It imports from the engine, never the reverse: it leaves records on a model's modules, which `tz.shard` reads. Of what
shares sequences, read chunks first, which rank holds what; tiles with kernels, which compute; modes with exchanges,
which bring ranks together; context, the face of these; and sharing with registry, how a model is told.
Open to other packages:

    mesh              the mesh of ranks by the names of its axes
    paper             a model cut for ranks that are not there, for those who count memory
    pipeline_order    what each rank of a pipeline runs, for those who count time and those who configure it
"""

from terrazzo.parallel.chunks import Balance, Chunks
from terrazzo.parallel.context import MODES, Context, Mode
from terrazzo.parallel.expert import ExpertRanks, Experts, permuted
from terrazzo.parallel.face import parallelize
from terrazzo.parallel.loss import VocabularyLoss, leave_vocabulary, vocabulary_of
from terrazzo.parallel.mesh import mesh, mesh_sizes
from terrazzo.parallel.pipeline import step
from terrazzo.parallel.pipeline_stages import Pipeline, check_line
from terrazzo.parallel.plans import check_styles, own_plan
from terrazzo.parallel.ranks import TensorRanks
from terrazzo.parallel.registry import KNOWN_TYPES, attention_heads, check_config
from terrazzo.parallel.sharing import context_of, share_sequences, whole_sequences
from terrazzo.parallel.styles import STYLES, Column, Embedding, Enter, Logits, Row, SplitSequence, Style, Uncut
from terrazzo.parallel.tensor import TensorPlan, style_of
from terrazzo.parallel.tiles import Sight

__all__ = [
    "KNOWN_TYPES",
    "MODES",
    "STYLES",
    "Balance",
    "Chunks",
    "Column",
    "Context",
    "Embedding",
    "Enter",
    "ExpertRanks",
    "Experts",
    "Logits",
    "Mode",
    "Pipeline",
    "Row",
    "Sight",
    "SplitSequence",
    "Style",
    "TensorPlan",
    "TensorRanks",
    "Uncut",
    "VocabularyLoss",
    "attention_heads",
    "check_config",
    "check_line",
    "check_styles",
    "context_of",
    "leave_vocabulary",
    "mesh",
    "mesh_sizes",
    "own_plan",
    "parallelize",
    "permuted",
    "share_sequences",
    "step",
    "style_of",
    "vocabulary_of",
    "whole_sequences",
]
