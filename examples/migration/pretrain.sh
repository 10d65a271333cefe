#!/bin/bash
GPUS=8
MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
PARALLEL=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 5000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 100
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --seed 42
)
torchrun --nproc-per-node $GPUS pretrain_gpt.py ${MODEL[@]} ${PARALLEL[@]} ${TRAINING[@]} \
    --data-path corpus_text_document --save runs/llama --save-interval 500 --load runs/llama --log-interval 10
