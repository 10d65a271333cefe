"""Megatron-LM's arguments (0.20), and those of earlier versions.

Names and defaults are those of its `megatron/training/arguments.py` and of the dataclasses that it makes arguments of.
"""

from __future__ import annotations

from dataclasses import replace
from math import frexp

from terrazzo.dialects.core.keys import (
    ANY,
    BOOLEAN,
    MISSING,
    NAME_LIST,
    TEXT,
    Key,
    Type,
    choice,
    integer,
    number,
    section,
)
from terrazzo.dialects.formats.megatron.keys_others import OTHERS

__all__ = [
    "ADAMS_SHARE",
    "ALIASES",
    "DECAYS",
    "DECAY_SHAPES",
    "DEGREES",
    "FSDP_ROWS",
    "KEYS",
    "LAUNCHER",
    "OPTIMIZERS",
    "OWNER_OF_BETAS",
    "REMOVED",
    "SCALES",
    "canonical",
]

LAUNCHER = "torchrun"
"""The section of what torchrun is given."""
DEGREES = {
    "mesh.tp": "tensor-model-parallel-size",
    "mesh.pp": "pipeline-model-parallel-size",
    "mesh.ep": "expert-model-parallel-size",
}
"""Arguments of the model axes, by the setting."""
FSDP_ROWS = {"no_shard": "zero0", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
"""Row of the table by Megatron-FSDP's strategy."""
DECAYS = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "wsd",
    "inverse-square-root": "inverse-square-root",
}
"""Schedules by --lr-decay-style in lower case."""
DECAY_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt", "exponential": "exponential"}
"""Shapes of WSD's final decay by --lr-wsd-decay-style."""

SCALES = {"spectral": "match_rms_adamw", "shape_scaling": "original", "unit_rms_norm": "unit_rms_norm"}
"""Ways by which Muon's updates follow a matrix's sides."""

_POWER = Type(
    "a power of two",
    lambda value: (
        MISSING if (power := number(2.0**-24).parse(value)) is MISSING or frexp(power)[0] != 0.5 else float(power)
    ),
)
_HALF = choice({"fp32": "fp32", "bf16": "bf16"}, fold=False)
_STATE = choice({"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}, fold=False)
_GRANULARITY = choice({"full": "full", "selective": "selective"}, fold=False)
_WAY = choice({"uniform": "uniform", "block": "block"}, fold=False)
_FORMAT = choice({"torch": "local", "torch_dist": "sharded", "torch_dcp": "sharded", "fsdp_dtensor": "sharded"})
_MODEL = "the model comes from your code there"
_RUN = "it does not change what is trained"


def _model(default: object, meaning: str, key: str) -> Key:
    beside = "num-experts" if key.startswith("experts.") else "num-layers"
    kind = BOOLEAN if default is False else ANY
    return Key(kind, default, meaning, "lossy", _MODEL, "" if default is None else beside, here=f"model.{key}")


_PARALLEL = {
    "tensor-model-parallel-size": Key(integer(1), 1, "tensor parallel degree"),
    "pipeline-model-parallel-size": Key(integer(1), 1, "pipeline parallel degree"),
    "context-parallel-size": Key(integer(1), 1, "context parallel degree"),
    "expert-model-parallel-size": Key(integer(1), 1, "expert parallel degree"),
    "expert-tensor-parallel-size": Key(
        ANY,
        None,
        "tensor parallel degree within experts; none: as of all else",
        "lossy",
        here="plan.mesh.ep, which deals experts out whole, over tensor parallel ranks too",
    ),
    "cp-comm-type": Key(NAME_LIST, "p2p", "how ranks compute attention over a sequence: p2p, a2a, allgather, a2a+p2p"),
    "sequence-parallel": Key(BOOLEAN, False, "tensor parallel ranks split sequences between matrices"),
    "num-layers-per-virtual-pipeline-stage": Key(integer(1), None, "layers of one of a rank's several stages"),
    "num-virtual-stages-per-pipeline-rank": Key(integer(1), None, "stages of each rank"),
    "use-distributed-optimizer": Key(BOOLEAN, False, "master weights and optimizer state are split over data ranks"),
    "num-distributed-optimizer-instances": Key(integer(1), 1, "groups of data ranks that hold all of the state each"),
    "use-torch-fsdp2": Key(BOOLEAN, False, "torch's FSDP2 splits weights, gradients and optimizer state"),
    "torch-fsdp2-no-reshard-after-forward": Key(BOOLEAN, False, "FSDP2: gathered weights are kept for backward"),
    "use-megatron-fsdp": Key(BOOLEAN, False, "Megatron's own FSDP"),
    "data-parallel-sharding-strategy": Key(
        choice(FSDP_ROWS, fold=False), "optim_grads_params", "Megatron-FSDP: what is split over data ranks"
    ),
    "outer-dp-sharding-strategy": Key(
        choice({"no_shard": "no_shard", "optim": "optim"}), "no_shard", "Megatron-FSDP: what is split over groups, too"
    ),
    "overlap-grad-reduce": Key(BOOLEAN, False, "gradients are reduced behind backward", "harmless", _RUN),
    "overlap-param-gather": Key(BOOLEAN, False, "weights are gathered behind forward", "harmless", _RUN),
}
_PRECISION = {
    "bf16": Key(BOOLEAN, False, "bf16 weights with masters in fp32"),
    "fp16": Key(BOOLEAN, False, "fp16 weights with masters in fp32, and a scaled loss"),
    "accumulate-allreduce-grads-in-fp32": Key(BOOLEAN, False, "gradients are summed and reduced in fp32; bf16 does so"),
    "grad-reduce-in-bf16": Key(BOOLEAN, False, "gradients are summed and reduced in bf16"),
    "use-precision-aware-optimizer": Key(BOOLEAN, False, "dtypes of the optimizer's states are chosen"),
    "main-grads-dtype": Key(_HALF, "fp32", "gradients as the optimizer sees them"),
    "main-params-dtype": Key(_STATE, "fp32", "weights that the optimizer updates"),
    "exp-avg-dtype": Key(_STATE, "fp32", "Adam's first moment"),
    "exp-avg-sq-dtype": Key(_STATE, "fp32", "Adam's second moment"),
    "loss-scale": Key(number(), None, "fixed loss scale; none: dynamic"),
    "initial-loss-scale": Key(_POWER, 2.0**32, "first dynamic loss scale"),
    "min-loss-scale": Key(_POWER, 1.0, "smallest dynamic loss scale"),
    "loss-scale-window": Key(number(1), 1000.0, "steps without overflow until the scale grows"),
    "hysteresis": Key(integer(1), 2, "overflows until the scale shrinks"),
    "fp8-format": Key(
        ANY, None, "matrix products in 8 bits", "refused", "Transformer Engine computes so: remove it for bf16"
    ),
    "fp4-format": Key(
        ANY, None, "matrix products in 4 bits", "refused", "Transformer Engine computes so: remove it for bf16"
    ),
}
_TRAINING = {
    "micro-batch-size": Key(integer(1), None, "sequences of a data rank in one micro-batch"),
    "global-batch-size": Key(integer(1), None, "sequences per optimizer step; none: one micro-batch per rank"),
    "rampup-batch-size": Key(
        ANY, None, "a global batch that grows", "refused", "the global batch is one size from the first step on"
    ),
    "step-batch-size-schedule": Key(
        ANY, None, "global batches by tokens seen", "refused", "the global batch is one size from the first step on"
    ),
    "seq-length": Key(integer(1), None, "tokens per sequence"),
    "train-iters": Key(integer(1), None, "optimizer steps"),
    "train-samples": Key(integer(1), None, "sequences of the run, in place of steps"),
    "optimizer": Key(TEXT, "adam", "adam (AdamW), sgd, muon, lion or others"),
    "lr": Key(number(), None, "learning rate (peak)"),
    "adam-beta1": Key(number(high=1), 0.9, "decay of the first moment"),
    "adam-beta2": Key(number(high=1), 0.999, "decay of the second moment"),
    "adam-eps": Key(number(), 1e-8, "term added to the denominator"),
    "lion-beta1": Key(number(high=1), 0.95, "lion: decay of the average whose sign is taken"),
    "lion-beta2": Key(number(high=1), 0.98, "lion: decay of the average that is kept"),
    "sgd-momentum": Key(number(), 0.9, "momentum of sgd"),
    "muon-momentum": Key(number(high=1), 0.9, "muon: momentum of matrices; the rest is adam's"),
    "muon-nesterov": Key(BOOLEAN, False, "muon: look ahead by the momentum"),
    "muon-num-ns-steps": Key(integer(1), 5, "muon: iterations that make a matrix orthogonal"),
    "muon-scale-mode": Key(choice(SCALES), "spectral", "muon: by a matrix's sides: spectral, shape_scaling or others"),
    "muon-extra-scale-factor": Key(number(), 1.0, "muon: factor of its updates"),
    "weight-decay": Key(number(), 0.01, "weight decay, of matrices"),
    "optimizer-cpu-offload": Key(BOOLEAN, False, "optimizer state and master weights in host memory"),
    "optimizer-offload-fraction": Key(number(high=1), 1.0, "share of them in host memory"),
    "lr-decay-style": Key(choice(DECAYS), "linear", "constant, linear, cosine, inverse-square-root or WSD"),
    "lr-decay-iters": Key(integer(1), None, "steps until the rate is at its lowest; none: the run's"),
    "lr-decay-samples": Key(integer(1), None, "the same in sequences"),
    "lr-wsd-decay-style": Key(choice(DECAY_SHAPES, fold=False), "exponential", "WSD: shape of the final decay"),
    "lr-wsd-decay-iters": Key(integer(1), None, "WSD: steps of the final decay"),
    "lr-wsd-decay-samples": Key(integer(1), None, "the same in sequences"),
    "lr-warmup-iters": Key(integer(), 0, "steps of linear warm-up"),
    "lr-warmup-samples": Key(integer(), 0, "the same in sequences"),
    "lr-warmup-fraction": Key(number(high=1), None, "the same as a share of the decay's length"),
    "lr-warmup-init": Key(number(), 0.0, "rate that the warm-up starts at"),
    "min-lr": Key(number(), 0.0, "lowest learning rate"),
    "clip-grad": Key(number(), 1.0, "largest global gradient norm; 0: no clipping"),
    "seed": Key(integer(), 1234, "seed of the run"),
    "calculate-per-token-loss": Key(BOOLEAN, False, "the loss is the mean over a step's tokens, not of micro-batches"),
    "no-check-for-nan-in-loss-and-grad": Key(BOOLEAN, False, "a run goes on with what is not finite; else it ends"),
    "decoupled-lr": Key(
        ANY, None, "another rate for embeddings and head", "refused", "all parameters have one learning rate"
    ),
    "recompute-activations": Key(BOOLEAN, False, "as recompute-granularity selective"),
    "recompute-granularity": Key(_GRANULARITY, None, "full: whole layers; selective: the core of attention"),
    "recompute-method": Key(_WAY, None, "full: groups of layers (uniform), or the first ones of a stage (block)"),
    "recompute-num-layers": Key(integer(1), None, "layers of such a group, or how many of them"),
    "perform-rl-step": Key(
        BOOLEAN, False, "a step is one of reinforcement learning", "refused", "there is none: a step is supervised"
    ),
}
_SAVING = {
    "save": Key(TEXT, None, "folder of checkpoints"),
    "save-interval": Key(integer(1), None, "steps between checkpoints"),
    "save-retain-interval": Key(
        ANY, None, "checkpoints at multiples of this are kept", "lossy", here="checkpoint.keep_every"
    ),
    "async-save": Key(BOOLEAN, False, "train on while a checkpoint is written"),
    "ckpt-format": Key(_FORMAT, "torch_dist", "torch (of these very ranks), torch_dist, torch_dcp or fsdp_dtensor"),
    "load": Key(ANY, None, "folder to resume from", "lossy", "say to the library itself what a run starts from"),
    "finetune": Key(
        BOOLEAN, False, "weights alone are loaded, and steps count from 0", "lossy", "weights are imported"
    ),
    "pretrained-checkpoint": Key(ANY, None, "weights that a run starts from", "lossy", "weights are imported there"),
    "eval-interval": Key(ANY, None, "steps between evaluations", "harmless", here="train.eval_every"),
    "eval-iters": Key(ANY, 100, "micro-batches of an evaluation", "harmless", here="train.eval_batches"),
    "log-interval": Key(ANY, 100, "steps between lines", "harmless", here="log.every"),
    "tensorboard-dir": Key(ANY, None, "folder of event files", "harmless", here="log.folder"),
    "yaml-cfg": Key(ANY, None, "a YAML file in place of arguments", "refused", "read that file, not this one"),
}
_SIZES = {
    "num-layers": _model(None, "number of blocks", "layers"),
    "hidden-size": _model(None, "width of the residual stream", "dim"),
    "num-attention-heads": _model(None, "query heads of a block", "heads"),
    "group-query-attention": _model(False, "heads share keys and values", "kv_heads"),
    "num-query-groups": _model(1, "key and value heads of a block", "kv_heads"),
    "ffn-hidden-size": _model(None, "width of the MLP; none: 4 (swiglu: 8/3) times that of the block", "ffn_dim"),
    "vocab-size": _model(None, "size of the vocabulary", "vocab_size"),
    "hidden-dropout": _model(0.1, "share of a block's output dropped", "dropout"),
    "attention-dropout": _model(0.1, "share of attention's weights dropped", "dropout, of a block's output alone"),
    "window-size": _model(None, "sliding window: tokens before and behind", "attention.window, one more: with itself"),
    "window-attn-skip-freq": _model(None, "one layer in so many has no window", "attention.full_every"),
    "rotary-base": _model(10000, "base of rotary position embeddings", "rope_theta"),
    "position-embedding-type": _model("learned_absolute", "kind of position embedding", "rope_theta: rope alone"),
    "normalization": _model("LayerNorm", "kind of norm", "kind: decoder, which has RMSNorm"),
    "swiglu": _model(False, "MLP with a gate", "kind: decoder, which has it"),
    "disable-bias-linear": _model(False, "linear layers without bias", "kind: decoder, which has none"),
    "untie-embeddings-and-output-weights": _model(False, "the head is a matrix of its own", "tie_embeddings: false"),
    "num-experts": _model(None, "experts of a mixture-of-experts layer", "experts.count"),
    "moe-router-topk": _model(2, "experts that compute a token", "experts.top_k"),
    "moe-ffn-hidden-size": _model(None, "width of an expert", "experts.ffn_dim"),
    "moe-shared-expert-intermediate-size": _model(None, "width of what computes every token", "experts.shared"),
    "moe-router-score-function": _model("softmax", "softmax or sigmoid", "experts.scores"),
    "moe-router-pre-softmax": _model(False, "softmax before the choice of experts", "experts.normalize"),
    "moe-router-enable-expert-bias": _model(False, "a bias keeps experts equally busy", "experts.balance: bias"),
    "moe-router-bias-update-rate": _model(0.001, "how far a step moves it", "experts.bias_rate"),
    "moe-aux-loss-coeff": _model(0.0, "weight of the loss that does so", "experts.loss_weight"),
    "moe-z-loss-coeff": _model(None, "weight of the z loss", "experts.z_loss"),
    "moe-apply-probs-on-input": _model(False, "weights multiply what experts are given", "experts.apply: before"),
    **{
        name: Key(ANY, None, meaning, "lossy", "the data come from your code there", here=key)
        for name, meaning, key in (
            ("tokenizer-model", "file or name of the tokenizer", "data.tokenizer"),
            ("data-path", "tokenized files, with weights", "data.source, which is text"),
            ("train-data-path", "the same for training alone", "data.source, which is text"),
            ("valid-data-path", "the same for evaluation", "data.validation_source"),
            ("split", "shares for training, evaluation and tests", "data.validation_fraction"),
        )
    },
    "reset-attention-mask": Key(
        BOOLEAN, False, "tokens see their own document alone", "lossy", here="data.attention: document"
    ),
    "use-flash-attn": Key(BOOLEAN, False, "FlashAttention", "harmless", "the numbers are the same up to rounding"),
}
_LAUNCHER = {
    "nproc-per-node": Key(integer(1), None, "ranks on each machine"),
    "nnodes": Key(integer(1), 1, "machines"),
    "<argument>": Key(ANY, None, "how torchrun starts ranks", "harmless", _RUN),
}
_ALWAYS = ("init-method-std", "norm-epsilon", "make-vocab-size-divisible-by")
"""Arguments of every model, by whose defaults something is done."""
KEYS: dict[str, Key] = {
    **section(LAUNCHER, _LAUNCHER),
    **_PARALLEL,
    **_PRECISION,
    **_TRAINING,
    **_SAVING,
    **_SIZES,
    **OTHERS,
    **{name: replace(OTHERS[name], lost_beside="num-layers") for name in _ALWAYS},
}
"""Rows by the argument without its dashes."""

ALIASES = {"persistent-save-interval": "save-interval"}
"""Other names of arguments."""
REMOVED = {
    "batch-size": "it is micro-batch-size",
    "warmup": "it is lr-warmup-fraction",
    "model-parallel-size": "it is tensor-model-parallel-size",
    "checkpoint-activations": "it is recompute-activations, or recompute-granularity and recompute-method",
    **dict.fromkeys(
        ("language_model", "model_parallel"),
        "the sections of a --yaml-cfg are not read, so give the arguments in one section, flat",
    ),
}
"""Arguments that Megatron-LM stops at, and sections that it has in another file; and what took their place."""


def canonical(key: str) -> str:
    """An argument by the name that `KEYS` has, however a file writes it: with dashes before it, or underscores."""
    section, dot, name = key.partition(".")
    if section == LAUNCHER and dot:
        return f"{section}.{name.lstrip('-').replace('_', '-')}"
    bare = key.lstrip("-")
    dashed = bare if bare in KEYS else bare.replace("_", "-")
    known = ALIASES.get(dashed, dashed)
    return known if known in KEYS or known in REMOVED else bare


OPTIMIZERS = {"adam": "AdamW", "sgd": "SGD", "lion": "Lion", "muon": "Muon"}
"""Class by --optimizer, as in torch.optim; Megatron-LM's adam decays weights as AdamW does."""

OWNER_OF_BETAS = {"AdamW": "adam", "Muon": "adam", "Lion": "lion"}
"""How the arguments of a class's betas begin; of Muon those are of what is no matrix."""

ADAMS_SHARE = 0.2
"""What `match_rms_adamw` multiplies Megatron-LM's `spectral` scale by."""
