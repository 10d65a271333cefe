"""State of a sharded model: set, and given back whole.

It leaves and enters in two forms. Pieces are this rank's runs of elements of single parameters, under the parameters'
own names: nothing is exchanged, and nothing of the plan is in them. State dicts are whole tensors, as plain PyTorch has
them, put together one bucket after the other on all ranks.

    who asks                                          goes through                      modules
    terrazzo.checkpoint saves                         ModelState.pieces                 pieces
    terrazzo.checkpoint loads                         ModelState.restore                restore
    model.state_dict(), tz.full_state_dict(model)     whole_state_dict, whole_weights   state_dict, whole_tensors
    model.load_state_dict(state)                      ModelState.load                   model_state
    optimizer.state_dict(), .load_state_dict(state)   OptimizerStates                   optimizer_states, restore

Read saved_states, what a checkpoint has of each bucket; model_state, with pieces and restore; buffers_and_extra_state,
which every rank holds whole; parameter_table, also of other stages of a pipeline; whole_tensors, state_dict and
optimizer_states; unit_snapshot, whether what is at rest stays as it was.
"""
