"""Context parallelism: ranks along `cp` have parts of the same sequences.

chunks                  which tokens each rank has
attention_masks         which tokens see which, as tiles
attention_tiles         one softmax over tiles
attention_kernels       attention of one tile
attention_modes         gather, ulysses and ring: what ranks exchange around the tiles
given_positions         where tokens are, and which documents and prefixes they can have
tensor_memo             what was computed from positions, until these change
context                 `Context`, which a model's attention calls
share_sequences         how a model is given a `Context`
transformers_attention  the attention function of models of transformers
"""
