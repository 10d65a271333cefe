"""Hooks that torch calls while a model runs, and that drive the schedule. The entry is `model_hooks.ModelHooks`.

One micro-batch, in the order in which torch calls them:

    model(x)                                    ForwardHooks.before_model      begins a ForwardPass
      unit(x)                                   ForwardHooks.before_unit       ForwardPass.enter: weights are here
        a weight is used outside its unit       ForwardHooks.reach             the same, until backward ends
      unit returns                              ForwardHooks.after_unit        ForwardPass.leave; watches its outputs
    model returns                               ForwardHooks.after_model       ForwardPass.end, where ranks meet
    model returns or raises                     ForwardHooks.model_ended       after an error: abandons the pass
    loss.backward()
      a gradient of a unit's output             BackwardHooks.enter            begins a BackwardPass; .enter
      a checkpointed unit runs again            ForwardHooks.before_unit,      BackwardPass.recompute
                                                then BackwardHooks.recompute
      autograd reads weights that it has saved  BackwardHooks.use_saved        only where nothing announced the unit
      a parameter's gradient is accumulated     BackwardHooks.accumulate_gradient   it moves into the bucket
    backward returns                            BackwardHooks.end              BackwardPass.end, then Agreement

    driven_parts     the parts of a model that hooks drive, and what is asked of its optimizers
    backward_hooks   what torch calls in a backward, and who else hears of gradients
    module_tree      modules and parameters that have come to the model after it was sharded, which a forward looks for
    broken_promises  what runs otherwise than the memory bill and the promised traffic were made for: said once each
    forward_hooks    what torch calls in a forward
    model_hooks      both of one model: puts them on it, and passes on what the engine asks of them

Read them in that order. What watches outputs and saved weights is in `autograd`; hooks around an optimizer's step are
in `optim/driver`.
"""
