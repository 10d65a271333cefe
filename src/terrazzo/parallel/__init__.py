"""The axes beside data: matrices, sequences, experts and layers that several ranks share.

It imports from the engine, never the reverse: it leaves records on a model's modules, which `tz.shard` reads. Each axis
has a folder or a module: `tensor` (tp), `context` (cp), `expert` (ep), `pipeline` (pp); `face` brings them together.
The way of a micro-batch through all of them, and where it is written:

    tz.step                     pipeline/step.py      all ranks are given the same, or none begins
    PipelineStep                  pipeline/pipeline_step.py    takes what the stage before has sent, by Messages
      the model's forward       pipeline/line.py      modules of other stages pass on what they are given
        a block begins          tensor/uses.py        a rank along tp takes its part of the sequence
          enter, column         tensor/uses.py        the parts are put together: whole tokens, a part of the heads
            attention           context/context.py    keys, or heads, of the ranks along cp
          row                   tensor/uses.py        sums, of which each takes its part of the sequence again
          router, rows          expert/rows.py        in the order of their experts
            experts             expert/ranks.py       to the ranks along ep that have them, and back
        the last block ends     tensor/uses.py        whole sequences
    PipelineStep                  pipeline/pipeline_step.py    sends them on, or computes the loss; all meet at the end

Each exchange is one `exchange(values, there, back)` of `exchanges`, whose gradient goes the other way.

Open to other packages:

    mesh              the mesh of ranks by the names of its axes
    limits            what ranks can share, in numbers, for those who refuse the rest before a model is there
    model_types       what is known of types of models of transformers, for those who refuse some or plan for them
    paper             a model cut for ranks that are not there, for those who count memory
    pipeline.order    what each rank of a pipeline runs, for those who count time and those who configure it
"""

from terrazzo.parallel.check import check
from terrazzo.parallel.context.chunks import Balance, Chunks
from terrazzo.parallel.context.context import MODES, Context, Mode
from terrazzo.parallel.context.registry import attention_heads, check_config
from terrazzo.parallel.context.sharing import context_of, share_sequences, whole_sequences
from terrazzo.parallel.context.tiles import AttentionMask
from terrazzo.parallel.expert.ranks import ExpertRanks, Experts
from terrazzo.parallel.expert.rows import RowOrder
from terrazzo.parallel.expert.sharing import check_experts
from terrazzo.parallel.expert.stacked import stacked_experts
from terrazzo.parallel.face import parallelize
from terrazzo.parallel.mesh import mesh, mesh_sizes
from terrazzo.parallel.pipeline.stages import Pipeline, check_line
from terrazzo.parallel.pipeline.step import step
from terrazzo.parallel.tensor.loss import VocabularyLoss, leave_vocabulary, vocabulary_of
from terrazzo.parallel.tensor.plans import check_styles, own_plan
from terrazzo.parallel.tensor.ranks import TensorRanks
from terrazzo.parallel.tensor.reading import TensorPlan, style_of
from terrazzo.parallel.tensor.styles import STYLES, Column, Embedding, Enter, Logits, Row, SplitSequence, Style, Uncut

__all__ = [
    "MODES",
    "STYLES",
    "AttentionMask",
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
    "RowOrder",
    "SplitSequence",
    "Style",
    "TensorPlan",
    "TensorRanks",
    "Uncut",
    "VocabularyLoss",
    "attention_heads",
    "check",
    "check_config",
    "check_experts",
    "check_line",
    "check_styles",
    "context_of",
    "leave_vocabulary",
    "mesh",
    "mesh_sizes",
    "own_plan",
    "parallelize",
    "share_sequences",
    "stacked_experts",
    "step",
    "style_of",
    "vocabulary_of",
    "whole_sequences",
]
