"""The models that are trained: the built-in decoder, those of transformers, and adapters on them.

objectives         what is learnt: the model, the loss, and what a validation measures
prepare            from the configuration to a model that is ready to be sharded
causal_lm          builds any of the models; their FLOPs and logits, and generating text
decoder            the built-in model
attention_pattern  the sliding windows of the built-in model's layers, or its prefix mask
rotary             its rotary positions
experts            the built-in model's mixture of experts
expert_load        how busy experts are, of all models
parallel           divides a model among ranks that share its layers, matrices or sequences
head_loss          computes the loss without all logits
reward             a model's body with one output, a score
huggingface        models of transformers, from a folder or its config.json
lora               adapters on a frozen base
linears            linear layers with products of 8-bit floats
as_llama           the built-in model and tokenizer in the format of transformers
"""
