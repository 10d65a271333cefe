"""The arguments of Megatron-LM that no setting stands for, by what they are about.

A name alone is a switch, off by default; one with `=` takes a value, and what follows is its default.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from terrazzo.dialects.core.key_verdict import Loss
from terrazzo.dialects.core.keys import ANY, BOOLEAN, Key

__all__ = ["OTHERS"]

_MODEL = "the model comes from your code there, or is built by the section model"
_DATA = "the data come from your code there, or from the section data"
_CUT = "how ranks share a layer or a sequence is the library's"
_RECOMPUTED = "which activations are computed again is the library's"
_OFFLOAD = "which activations go to host memory is the library's; offload.activations does so for all that is kept"
_NUMBERS = "without it the numbers are others"
_NARROW = (
    "Transformer Engine computes so, and the numbers are others without it: remove it to train in precision.compute"
)
_START = "how a run starts and resumes is said to the library itself"
_FILES = "how checkpoints are written is the library's"
_KERNEL = "the numbers are the same up to rounding"
_RUN = "it does not change what is trained"
_SERVING = "nothing is trained by it"
_RL = "reinforcement learning is no part of a configuration there"
_PROGRAM = "a program of Megatron-LM's own"


class SharedMeaning(NamedTuple):
    """Arguments that share a meaning, and what another dialect loses with each. See `Key`."""

    meaning: str
    loss: Loss
    why: str
    names: str


_FAMILIES = (
    SharedMeaning(
        "of the model",
        "lossy",
        _MODEL,
        """
        activation-func-clamp-value= add-qkv-bias apply-layernorm-1p apply-query-key-layer-scaling
        apply-residual-connection-post-layernorm attention-output-gate data-parallel-random-init decoder-num-layers=
        disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu dsa-indexer-head-dim=
        dsa-indexer-k-norm-epsilon= dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff= dsa-indexer-n-heads=
        dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset=0 dsa-indexer-topk-freq=1 dsa-indexer-topk=
        dsa-indexer-use-sparse-loss embedding-init-method-std= enable-experimental enable-mhc-connections
        encoder-num-layers= experimental-attention-variant= fp32-residual-connection gdp-num-householder=3
        glu-linear-offset=0.0 heterogeneous-layers-config-encoded-json= heterogeneous-layers-config-path=
        hybrid-layer-pattern= hybrid-override-pattern= init-method-std=0.02 init-method-xavier-uniform is-hybrid-model
        kv-channels= kv-lora-rank=32 linear-attention-freq= linear-conv-kernel-dim=4 linear-key-head-dim=128
        linear-num-key-heads=16 linear-num-value-heads=32 linear-value-head-dim=128 make-vocab-size-divisible-by=128
        mamba-head-dim=64 mamba-num-groups=8 mamba-num-heads= mamba-state-dim=128 max-position-embeddings=
        mhc-init-gating-factor=0.01 mhc-num-residual-streams=4 mhc-sinkhorn-iterations=20 moe-enable-routing-replay
        moe-expert-capacity-factor= moe-expert-rank-capacity-factor= moe-input-jitter-eps= moe-latent-size=
        moe-layer-freq=1 moe-mlp-glu-interleave-size= moe-pad-expert-input-to-capacity moe-router-dtype=
        moe-router-force-biased= moe-router-force-load-balancing moe-router-group-topk=
        moe-router-load-balancing-type=aux_loss moe-router-num-groups= moe-router-quantile-balancing-ema=0.0
        moe-router-topk-scaling-factor= moe-shared-expert-gate moe-shared-expert-glu-interleave-size=
        moe-token-drop-policy=probs moe-upcycling-granularity=1 moe-use-upcycling mrope-section= mscale-all-dim=0.0
        mscale=1.0 mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern= mtp-num-layers= mtp-use-repeated-layer
        multi-latent-attention no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu no-initialization
        no-position-embedding no-rope-freq= no-yarn-correction-range-round-to-int norm-epsilon=1e-05 openai-gelu
        q-lora-rank= qk-clip-alpha=0.5 qk-clip-threshold=100 qk-head-dim=128 qk-l2-norm qk-layernorm
        qk-pos-emb-head-dim=64 quick-geglu relative-attention-max-distance=128 relative-attention-num-buckets=32
        rope-scaling-factor=8.0 rope-type= rotary-interleaved rotary-percent=1.0 rotary-scaling-factor=1.0
        rotary-seq-len-interpolation-factor= softmax-type=vanilla spec= squared-relu use-rope-scaling
        use-rotary-position-embeddings v-head-dim=128 yarn-beta-fast=
        yarn-beta-slow= yarn-correction-range-round-to-int yarn-original-max-position-embeddings=
        """,
    ),
    SharedMeaning(
        "of the data and their tokens",
        "lossy",
        _DATA,
        """
        allow-ambiguous-pad-tokens chat-template= data-args-path= data-cache-path= dataloader-defer-npy-index-mmap
        dataloader-fast-cache-load dataloader-inter-document-masking dataloader-type= decoder-seq-length=
        disable-pad-vocab-size disable-tokenizer-sentencepiece-ignore-extra-whitespaces encoder-seq-length=
        eod-mask-loss fim-data fim-eod-token=<|endoftext|> fim-fragment-rate= fim-middle-token=<fim_middle>
        fim-no-prefix= fim-pad-token=<fim_pad> fim-prefix-token=<fim_prefix> fim-rate=0.5 fim-split-sample=
        fim-spm-rate=0.5 fim-suffix-token=<fim_suffix> mask-prob=0.15 merge-file= mid-level-dataset-surplus=0.005
        mock-data no-create-attention-mask-in-dataloader no-mmap-bin-files no-pad-vocab-size
        no-tokenizer-sentencepiece-ignore-extra-whitespaces null-tokenizer-eod-id= null-tokenizer-pad-id=-1
        num-dataset-builder-threads=1 num-workers=2 object-storage-cache-path= padded-vocab-size=
        per-dataset-sequences-path= per-split-data-args-path= phase-transition-iterations= reset-position-ids
        sample-rate=1.0 sft-tokenizer-prompt-format=nemotron-h-aligned short-seq-prob=0.1 test-data-path=
        tiktoken-num-special-tokens=1000 tiktoken-pattern= tokenizer-hf-no-include-special-tokens
        tokenizer-hf-no-use-fast tokenizer-metadata= tokenizer-sentencepiece-legacy tokenizer-special-tokens=
        tokenizer-type= trust-remote-code use-gigatoken vocab-extra-ids=0 vocab-file=
        """,
    ),
    SharedMeaning(
        "how ranks share the work",
        "lossy",
        _CUT,
        """
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split decoder-first-pipeline-num-layers=
        decoder-last-pipeline-num-layers= enable-full-sharding-in-hsdp expert-tensor-parallel-num-weight-shards=
        gtp-remat-opt-in-modules= hierarchical-context-parallel-sizes= hybrid-context-parallel
        max-seqlen-per-dp-cp-rank= megatron-fsdp-grad-comm-dtype=auto megatron-fsdp-main-grads-dtype=auto
        megatron-fsdp-main-params-dtype=fp32 pipeline-model-parallel-layout= tensor-parallel-num-weight-shards=
        use-tp-pp-dp-mapping
        """,
    ),
    SharedMeaning(
        "which activations are kept",
        "lossy",
        _RECOMPUTED,
        """
        distribute-saved-activations ep-overlap-early-attn-memory-release gdp-num-chunk-states-to-recompute=2
        mhc-recompute-layer-num= moe-layer-recompute moe-paged-stash moe-paged-stash-buffer-size-factor-cpu=0.0
        moe-paged-stash-buffer-size-factor-cuda=1.1 moe-paged-stash-page-size=64 recompute-modules=
        """,
    ),
    SharedMeaning(
        "which activations go to host memory",
        "lossy",
        _OFFLOAD,
        """
        activation-offload-fraction=1.0 cpu-offloading-num-layers=0 cpu-offloading-retain-pinned-cpu-buffers
        delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks=0 fine-grained-activation-offloading
        fine-grained-offloading-max-inflight-offloads= min-offloaded-tensor-size=1048576 offload-modules=
        use-torch-optimizer-for-cpu-offload
        """,
    ),
    SharedMeaning(
        "what is computed in a step",
        "refused",
        _NUMBERS,
        """
        apply-wd-to-qk-layernorm decoupled-min-lr= decrease-batch-size-if-needed end-weight-decay= fp16-lm-cross-entropy
        freeze-all-layers head-lr-mult=1.0 iterations-to-skip=
        mtp-loss-scaling-factor=0.1 muon-coefficient-type=quintic muon-fp32-matmul-prec=medium muon-no-split-qkv
        muon-scalar-optimizer=adam muon-tp-mode=duplicated muon-use-syrk
        mup-attn-scale-power=1.0 mup-base-head-dim= mup-base-hidden-size= mup-embedding-mult=1.0 mup-output-mult=1.0
        mup-width-mult=1.0 no-weight-decay-cond-type= qk-clip sft start-weight-decay= use-mup
        weight-decay-incr-style=constant
        """,
    ),
    SharedMeaning(
        "matrix products in 8 or 4 bits",
        "refused",
        _NARROW,
        """
        disable-fp8-wgrad first-last-layers-bf16 fp4-param-gather fp4-quantizer-factory= fp4-recipe=nvfp4
        fp8-amax-compute-algo=most_recent fp8-amax-history-len=1 fp8-interval=1 fp8-margin=0 fp8-output-proj
        fp8-param-gather fp8-quantizer-factory= fp8-recipe=delayed keep-fp8-transpose-cache
        kitchen-attention-backend=sdpa moe-combine-bwd-dtype=bf16 moe-dispatch-fwd-dtype=bf16 moe-router-padding-for-fp8
        moe-router-padding-for-quantization no-fp8-wgrad num-layers-at-end-in-bf16=1 num-layers-at-start-in-bf16=1
        reuse-grad-buf-for-mxfp8-param-ag te-precision-config-file= use-kitchen-attention
        """,
    ),
    SharedMeaning(
        "how a run starts, resumes and ends",
        "lossy",
        _START,
        """
        auto-detect-ckpt-format ckpt-convert-format= ckpt-convert-save= ckpt-convert-update-legacy-dist-opt-format
        ckpt-step= disable-use-tokenizer-model-from-checkpoint-args exit-duration-in-mins= exit-interval=
        load-main-params-from-ckpt no-load-optim no-load-rng no-save-optim no-use-tokenizer-model-from-checkpoint-args
        override-ckpt-iteration= override-opt-param-scheduler skip-train test-mode
        use-checkpoint-args use-checkpoint-opt-param-scheduler
        use-mp-args-from-checkpoint-args
        """,
    ),
    SharedMeaning(
        "files of a checkpoint",
        "harmless",
        _FILES,
        """
        async-ckpt-cpu-priority=10 async-ckpt-io-priority=3 async-ckpt-use-cpu-shm async-strategy=nvrx
        ckpt-assume-constant-structure ckpt-drop-redundant-extra-state ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo=broadcast ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group=dp ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group=dp
        ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path= disable-ckpt-load-validate-sharding-integrity
        disable-save-tokenizer-assets disable-strict-fsdp-dtensor-load dist-ckpt-format=
        dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness=assume_ok_unexpected
        dist-ckpt-workers=1 distrib-optim-fully-reshardable-mem-efficient no-ckpt-fully-parallel-save
        no-ckpt-load-validate-sharding-integrity no-save-rng no-save-tokenizer-assets no-strict-fsdp-dtensor-load
        non-persistent-ckpt-type= non-persistent-global-ckpt-dir= non-persistent-local-ckpt-algo=fully_parallel
        non-persistent-local-ckpt-dir= non-persistent-save-interval= replication replication-factor=2 replication-jump=
        save-activations-interval= save-dgrads-interval= save-params-interval= save-tokens-per-expert-interval=
        save-wgrads-interval= use-dist-ckpt use-persistent-ckpt-worker verify-integrity
        """,
    ),
    SharedMeaning(
        "how something is computed or sent",
        "harmless",
        _KERNEL,
        """
        attention-backend=auto attention-softmax-in-fp32 batch-invariant-backend=te_native batch-invariant-mode
        create-all-gather-group cross-entropy-fusion-impl=native cross-entropy-loss-fusion cuda-graph-impl=none
        cuda-graph-warmup-steps=3 ddp-average-in-collective ddp-bucket-size= ddp-num-buckets=
        ddp-pad-buckets-for-high-nccl-busbw ddp-param-name-patterns-for-fp32-local-accumulation=
        ddp-reduce-scatter-with-fp32-accumulation defer-embedding-wgrad-compute delay-wgrad-compute deterministic-mode
        disable-align-grad-reduce disable-bf16-reduced-precision-matmul disable-clone-scatter-output-in-embedding
        disable-gloo-process-groups disable-jit-fuser disable-mamba-mem-eff-path disable-symmetric-registration
        disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
        disable-tp-comm-split-ag disable-tp-comm-split-rs distributed-backend=nccl distributed-timeout-minutes=10
        distributed-timeout-seconds-after-init= dsa-kernel-backend=none enable-cuda-graph external-cuda-graph
        fake-process-group flash-attention-version= fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer
        fsdp-manual-registration fused-residual-rmsnorm gdp-cutedsl-kernel gtp-expert-remat-nccl-ub gtp-remat-nccl-ub
        gtp-remat-reduce-scatter-with-fp32-accumulation high-priority-a2a-comm-stream high-priority-stream-groups=
        init-model-with-meta-device lazy-mpu-init local-rank=0 mamba-training-ssm-states-dtype=
        megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer megatron-fsdp-version=1
        microbatch-group-size-per-virtual-pipeline-stage= mla-down-proj-fusion mlp-chunks-for-training=1
        moe-deepep-num-sms= moe-enable-deepep moe-flex-dispatcher-backend=deepep moe-flex-dispatcher-num-sms=
        moe-grouped-gemm moe-hybridep-num-blocks-permute= moe-hybridep-num-blocks-unpermute=
        moe-hybridep-num-sms-preprocessing=108 moe-hybridep-num-sms= moe-hybridep-pad-uneven-dispatch-inputs
        moe-ncclep-zero-copy moe-permute-fusion moe-permute-fusion-into-hybridep moe-router-fusion
        moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight moe-token-dispatcher-type=allgather
        moe-use-grouped-tensor nccl-communicator-config-path= no-align-grad-reduce no-align-param-gather
        no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-clone-scatter-output-in-embedding
        no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-masked-softmax-fusion
        no-overlap-p2p-communication no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params no-rope-fusion
        no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag
        no-tp-comm-split-rs no-use-layer-wise-param-layout onnx-safe= optimizer-cuda-graph output-logit-dtype=
        overlap-cpu-optimizer-d2h-h2d overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm
        overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
        pipeline-model-parallel-comm-backend= sharp-enabled-group= suggested-communication-unit-size= symmetric-ar-type=
        te-rng-tracker tp-comm-bootstrap-backend=nccl tp-comm-overlap tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad
        transformer-impl=transformer_engine use-cpu-initialization use-fused-weighted-squared-relu
        use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert use-mcore-models use-nccl-ub
        use-ring-exchange-p2p use-sharp use-te-activation-func use-transformer-engine-op-fuser wgrad-deferral-limit=0
        """,
    ),
    SharedMeaning(
        "evaluation",
        "harmless",
        _RUN,
        """
        eval-global-batch-size= eval-micro-batch-size= full-validation multiple-validation-sets start-eval-at-iter=
        validation-set-names=
        """,
    ),
    SharedMeaning(
        "what is logged and timed",
        "harmless",
        _RUN,
        """
        app-tag-run-name= app-tag-run-version=0.0.0 config-logger-dir= disable-log-loss-scale-to-tensorboard
        dump-param-to-param-group-map= log-device-memory-used log-energy log-max-attention-logit log-memory-interval=
        log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress log-throughput
        log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard logging-level=
        memory-snapshot-path=snapshot.pickle moe-per-layer-logging moe-routing-trace-capture-hidden-states
        moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-routing-trace-max-training-iters=
        moe-routing-trace-path= no-barrier-with-level-1-timing no-log-loss-scale-to-tensorboard no-one-logger
        nvtx-ranges one-logger-async one-logger-project=megatron-lm one-logger-run-name= otel-enabled otel-service-name=
        otel-span-groups= profile profile-ranks= profile-step-end=12 profile-step-start=10
        pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes
        record-memory-history record-shapes run-workload-inspector-server tensorboard-log-interval=1
        tensorboard-queue-size=1000 timing-log-level=0 timing-log-option=minmax use-pytorch-profiler wandb-entity=
        wandb-exp-name= wandb-project= wandb-save-dir=
        """,
    ),
    SharedMeaning(
        "how a run is watched and restarted",
        "harmless",
        _RUN,
        """
        adlr-autoresume adlr-autoresume-interval=1000 calc-ft-timeouts check-for-large-grads check-for-spiky-loss
        check-weight-hash-across-dp-replicas-interval= disable-flight-recorder-dump-on-timeout
        disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active disable-manual-gc-eval
        disable-msc disable-straggler-on-startup empty-unused-memory-level=0 enable-ft-package enable-msc
        error-injection-rate=0 error-injection-type=transient_error exit-on-missing-checkpoint exit-signal-handler
        exit-signal-handler-for-dataloader exit-signal-handler-for-training exit-signal=SIGTERM
        fault-injector-delay-start-iteration= fault-injector-fault-delay= fault-injector-fault-probabilities=
        fault-injector-fault-types= fault-injector-mtti-seconds= fault-injector-num-ranks=
        fault-injector-offset-seconds= fault-injector-ranks= fault-injector-seed= flight-recorder-dump-path=
        flight-recorder-include-stack-trace flight-recorder-trace-buffer-size=2000 ft-num-warmup-iters=5
        gpu-sniff-test-interval= inprocess-active-world-size=1 inprocess-barrier-timeout=120
        inprocess-completion-timeout=120 inprocess-empty-cuda-cache inprocess-granularity=node inprocess-hard-timeout=90
        inprocess-heartbeat-interval=30 inprocess-heartbeat-timeout=60 inprocess-last-call-wait=1
        inprocess-max-iterations= inprocess-monitor-process-interval=1.0 inprocess-monitor-thread-interval=1.0
        inprocess-progress-watchdog-interval=1.0 inprocess-restart inprocess-soft-timeout=60
        inprocess-termination-grace-time=1 log-straggler manual-gc manual-gc-interval=0
        no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
        no-flight-recorder-include-only-active no-manual-gc-eval rerun-mode=validate_results
        result-rejected-tracker-filename= straggler-ctrlr-port=65535 straggler-minmax-count=1 train-sync-interval=
        """,
    ),
    SharedMeaning(
        "inference",
        "harmless",
        _SERVING,
        """
        bert-embedder-type=megatron cache-mla-latents cuda-graph-modules= cuda-graph-scope= decode-only-cuda-graphs
        enable-chunked-prefill flash-decode inference-batch-times-seqlen-threshold=-1 inference-coordinator-port=
        inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens=512 inference-cuda-graph-scope=
        inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching
        inference-dynamic-batching-async-sched-mode=legacy inference-dynamic-batching-block-size=256
        inference-dynamic-batching-buffer-size-gb=40.0 inference-dynamic-batching-cuda-graph-mixed-prefill-count=16
        inference-dynamic-batching-cuda-graph-sizing-distribution=exponential
        inference-dynamic-batching-logprobs-mode=raw_logprobs inference-dynamic-batching-mamba-memory-ratio=
        inference-dynamic-batching-max-requests= inference-dynamic-batching-max-tokens=
        inference-dynamic-batching-num-cuda-graphs=16 inference-dynamic-batching-paused-buffer-size-gb=
        inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-coordinator-policy=load_balanced
        inference-dynamic-batching-prefix-caching-eviction-policy=ref_zero
        inference-dynamic-batching-prefix-caching-mamba-gb= inference-dynamic-batching-prefix-caching-routing-alpha=0.5
        inference-dynamic-batching-sampling-backend=torch inference-dynamic-batching-track-generated-token-events
        inference-dynamic-batching-track-paused-request-events inference-dynamic-batching-unified-memory-level=0
        inference-fuse-tp-communication inference-grouped-gemm-backend=vllm inference-logging-step-interval=0
        inference-max-requests=8 inference-max-seq-length=2560 inference-moe-disable-fused-quant-kernels
        inference-moe-token-dispatcher-type=nvls inference-rng-tracker inference-shards=
        inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging
        mamba-inference-conv-states-dtype=bf16 mamba-inference-ssm-states-dtype=bf16 max-tokens-to-oom=12000
        mlp-chunks-for-prefill=1 moe-pad-experts-for-cuda-graph-inference nccl-all-reduce-for-prefill
        no-inference-disable-ep-consensus no-inference-dynamic-batching-prefix-caching
        no-inference-text-gen-server-logging no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging
        num-speculative-tokens=0 output-bert-embeddings use-legacy-static-engine use-same-sampling-seed-across-dp-ranks
        """,
    ),
    SharedMeaning(
        "reinforcement learning",
        "lossy",
        _RL,
        """
        grpo-clamp-eps-lower=0.01 grpo-clamp-eps-upper=0.01 grpo-entropy-term-weight=0.0
        grpo-filter-groups-with-same-reward grpo-group-size=2 grpo-iterations=2 grpo-kl-beta=0.001
        grpo-prompts-per-step=32 langrl-env-config= no-rl-inference-logprobs-is-correction
        no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts no-rl-persist-cuda-graphs
        no-rl-skip-bos-token no-rl-training-cuda-graphs no-rl-use-sequence-packing no-rl-verify-model-weights-swap
        refit-method=gloo rl-consumption-granularity=B rl-default-temperature=1.0 rl-default-top-k=-1 rl-default-top-p=0
        rl-durable-rollout-bank rl-generation-lag= rl-importance-sampling-truncation-coef=
        rl-inference-expert-model-parallel-size= rl-inference-expert-tensor-model-parallel-size=
        rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level=0 rl-inference-parsers=
        rl-inference-pipeline-model-parallel-size= rl-inference-tensor-model-parallel-size=
        rl-kv-cache-management-mode=persist rl-max-inflight-requests= rl-offload-inference-model-weights-when-idle
        rl-offload-optimizer-during-inference rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir=
        rl-prompts-per-eval=32 rl-rollout-bank-dir= rl-rollout-bank-max-bytes=0 rl-sequence-packing-algo=fifo
        rl-sequence-packing-max-sequences-per-bin=50 rl-skip-bos-token rl-submission-granularity=B
        rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
        """,
    ),
    SharedMeaning(
        "programs for BERT, vision, retrieval and distillation",
        "lossy",
        _PROGRAM,
        """
        bert-load= bert-no-binary-head biencoder-projection-dim=0 biencoder-shared-query-context-model block-data-path=
        classes-fraction=1.0 data-per-class-fraction=1.0 dino-bottleneck-size=256 dino-freeze-last-layer=1
        dino-head-hidden-size=2048 dino-local-crops-number=10 dino-local-img-size=96 dino-norm-last-layer
        dino-teacher-temp=0.07 dino-warmup-teacher-temp-epochs=30 dino-warmup-teacher-temp=0.04 embedding-path=
        evidence-data-path= ict-head-size= ict-load= img-h=224 img-w=224 indexer-batch-size=128
        indexer-log-interval=1000 iter-per-epoch=1250 logits-load-decode-threads=4 logits-load-dir=
        logits-load-ignore-errors logits-load-kd-loss-alpha=1.0 logits-load-msc-prefetch-depth=2
        logits-load-prefetch-factor=3 logits-save-dir= logits-save-dtype=fp16 logits-save-top-k=
        logits-save-top-p-min-k=1 logits-save-top-p= mask-factor=1.0 mask-type=random mtp-standalone no-data-sharding
        num-channels=3 num-classes=1000 patch-dim=16 query-in-block-prob=0.1 retriever-report-topk-accuracies=
        retriever-score-scaling swin-backbone-type=tiny titles-data-path= use-one-sent-docs vision-backbone-type=vit
        vision-pretraining vision-pretraining-type=classify
        """,
    ),
)


def _rows(family: SharedMeaning) -> dict[str, Key]:
    rows = {}
    for name, takes, default in (word.partition("=") for word in family.names.split()):
        kind = ANY if takes else BOOLEAN
        rows[name] = Key(kind, _value(default) if takes else False, family.meaning, family.loss, family.why)
    return rows


def _value(text: str) -> Any:
    """A default as a document has it; None for none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


OTHERS: dict[str, Key] = {name: row for family in _FAMILIES for name, row in _rows(family).items()}
"""Rows by the argument's name."""
