"""Context parallelism: ranks along `cp` have parts of the same sequences.

chunks                  which tokens each rank has
attention_masks         which tokens see which, as tiles
attention_tiles         one softmax over tiles
attention_kernels       attention of one tile
attention_modes         gather, ulysses and ring: what ranks exchange around the tiles
mode_rules              the names of these, and what each asks of a model
given_positions         where tokens are, and which documents and prefixes they can have
tensor_memo             what was computed from positions, until these change
document_places         where documents begin and prefixes end, and the masks that follow
same_sequences          what ranks were given, compared
context                 `Context`, which a model's attention calls
share_sequences         how a model is given a `Context`
transformers_attention  the attention function of models of transformers
"""
