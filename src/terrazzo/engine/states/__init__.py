"""The state of a sharded model: made, set, and given back whole.

Read model_state, with pieces and restore, what there is to save and how it comes back; listing, what of that other
stages of a pipeline have; whole, state_dict and optimizer_states, what is put together as plain PyTorch has it; ema, a
moving average; held, whether what is at rest stays as it was; and materialize, which gives a model from the meta device
its first values.
"""
