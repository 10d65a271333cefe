"""State of a sharded model: set, and given back whole.

It leaves and enters in two forms. Pieces are this rank's runs of elements of single parameters, under the parameters'
own names: nothing is exchanged, and nothing of the plan is in them. State dicts are whole tensors, as plain PyTorch has
them, put together one bucket after the other on all ranks.

    who asks                                          goes through                      modules
    terrazzo.checkpoint saves                         ModelState.pieces                 pieces
    terrazzo.checkpoint loads                         ModelState.restore                restore
    model.state_dict(), tz.full_state_dict(model)     whole_state_dict, whole_weights   state_dict, whole_tensors
    model.load_state_dict(state)                      GivenWeights.take                 given_weights
    optimizer.state_dict(), .load_state_dict(state)   OptimizerStates                   optimizer_states
      whole: out                                      whole_states                      whole_states
      whole: in                                       take_states                       given_states, restore

    state_names              names in checkpoints of states of which several ranks have their own
    saved_states             what checkpoints have of each bucket, and which ranks hold the same of it
    model_state              what checkpoints ask: what there is to save of a sharded model, and how it comes back
    pieces                   all state as named pieces, for checkpoints
    restore                  all state, set again from ranges of such pieces
    buffers_and_extra_state  persistent buffers, and what modules put into state dicts: every rank holds them whole
    parameter_table          a row for each parameter of the whole model, also of other stages of a pipeline
    whole_tensors            whole weights and states, one bucket after the other
    state_dict               the state dict of a model, as a plain one has it
    given_weights            the same, given whole: a rank takes its part, and hears whether all were given the same
    stepped_parameters       parameters that one optimizer steps: their names, where each is, what is kept for it
    whole_states             what it keeps for them, whole
    given_states             the same, given whole: a rank takes its part, once all have been given the same
    optimizer_states         both as torch has them, in a state dict
    unit_snapshot            what a rank holds of a unit at rest, to see whether that stays as it was

Read them in that order.
"""
