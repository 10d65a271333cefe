"""The axes beside data: ranks that share a model's matrices, sequences, experts or layers.

Each axis has a folder: `tensor` (tp), `context` (cp), `expert` (ep), `pipeline` (pp). `parallelize_model` sets all of
them up on one model. This package imports from the engine, never the reverse: it leaves records on a model's modules,
which `tz.shard` reads. A micro-batch goes through it as follows:

    tz.step                     pipeline/step.py                    all ranks compare what they were given
    ScheduleRunner              pipeline/schedule_runner.py         receives what the stage before has sent
      the model's forward       pipeline/stage_forward.py           runs this rank's modules alone
        a block begins          tensor/sequence_split.py            a rank along tp takes its part of the sequence
          enter, column         tensor/module_hooks.py              the parts are gathered: all tokens, some heads
            attention           context/context.py                  keys, or heads, of the ranks along cp
          row                   tensor/linear_forwards.py           outputs are summed, and each takes its part again
          router, rows          expert/row_order.py                 rows are sorted by their experts
            experts             expert/dispatch.py                  rows go to the ranks along ep, and back
        the last block ends     tensor/sequence_split.py            the parts are gathered again
    ScheduleRunner              pipeline/schedule_runner.py         sends the output on, or computes the loss

Along tp, cp and ep an exchange is one `exchange(values, forward, backward)` of `exchanges`: what it sends, and what its
gradient does. Stages send messages (`pipeline.messages`) of which autograd knows nothing: `ScheduleRunner` sends the
gradients back.

Modules of all axes, in reading order:

    input_fingerprints  inputs of a model, compared between ranks that must have the same
    local_parameters    parameters of which a rank keeps a part, and how their modules save and load states
    peft_adapters       which matrices of LoRA adapters are cut with the modules they are on
    parallelize_model   `tz.parallelize`: all axes on one model

Open to other packages:

    mesh                  the mesh of ranks by the names of its axes
    sharing_rules         what ranks can share, by numbers alone: checks before there is a model
    transformers_support  which model types of transformers ranks can share, and how
    simulated_ranks       a model that is cut for ranks that are not there, to count its memory
    pipeline.schedules    what each rank of a pipeline runs, and in which order
"""

from terrazzo.parallel.context.attention_kernels import ROWS as TILE_ROWS
from terrazzo.parallel.context.attention_masks import WINDOW_ROWS, AttentionMask
from terrazzo.parallel.context.chunks import Balance, Chunks
from terrazzo.parallel.context.context import Context
from terrazzo.parallel.context.mode_rules import MODES, Mode
from terrazzo.parallel.context.share_sequences import context_of, share_sequences, whole_sequences
from terrazzo.parallel.context.transformers_attention import attention_heads, check_config
from terrazzo.parallel.expert.dispatch import ExpertRanks, Experts
from terrazzo.parallel.expert.row_order import RowOrder
from terrazzo.parallel.expert.share_experts import check_experts
from terrazzo.parallel.expert.transformers_experts import stacked_experts
from terrazzo.parallel.mesh import mesh, mesh_sizes
from terrazzo.parallel.parallelize_model import parallelize
from terrazzo.parallel.pipeline.cut_into_stages import Pipeline, check_line
from terrazzo.parallel.pipeline.step import step
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.channels.declared import declare
from terrazzo.parallel.tensor.compare_with_whole import check
from terrazzo.parallel.tensor.model_plans import check_styles, own_plan
from terrazzo.parallel.tensor.read_plan import TensorPlan, styles_of
from terrazzo.parallel.tensor.styles import (
    STYLES,
    Colwise,
    Embedding,
    Enter,
    Logits,
    Replicate,
    Rowwise,
    SplitSequence,
    Style,
)
from terrazzo.parallel.tensor.vocabulary_loss import VocabularyLoss, leave_vocabulary, vocabulary_of

__all__ = [
    "MODES",
    "STYLES",
    "TILE_ROWS",
    "WINDOW_ROWS",
    "AttentionMask",
    "Balance",
    "Chunks",
    "Colwise",
    "Context",
    "Embedding",
    "Enter",
    "ExpertRanks",
    "Experts",
    "Logits",
    "Mode",
    "Pipeline",
    "Replicate",
    "RowOrder",
    "Rowwise",
    "SplitSequence",
    "Style",
    "TensorPlan",
    "TensorRanks",
    "VocabularyLoss",
    "attention_heads",
    "check",
    "check_config",
    "check_experts",
    "check_line",
    "check_styles",
    "context_of",
    "declare",
    "leave_vocabulary",
    "mesh",
    "mesh_sizes",
    "own_plan",
    "parallelize",
    "share_sequences",
    "stacked_experts",
    "step",
    "styles_of",
    "vocabulary_of",
    "whole_sequences",
]
