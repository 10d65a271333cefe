"""The models that are trained: the built-in decoder, those of transformers, and adapters on them."""
