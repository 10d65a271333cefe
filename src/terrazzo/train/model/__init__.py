"""The models that are trained: the built-in decoder, those of transformers, and adapters on them.

objectives         what is learnt: its model, its loss, and what a validation measures
prepare            from the configuration to what is ready to be sharded
causal_lm          any of them, built; its operations, logits, and text that it writes
decoder            the built-in model
attention_pattern  how far the built-in model's tokens see, layer by layer
experts            its mixture of experts
expert_load        how busy experts are, of either kind
parallel           a model given to ranks that share its layers, matrices or sequences
head_loss          the loss in place of logits, which no rank has then
reward             a body of either with one output, a score
huggingface        models of transformers, from a folder or its config.json
lora               adapters on a frozen base
linears            linear layers with products of 8-bit floats
as_llama           the built-in model and tokenizer as transformers has them
"""
