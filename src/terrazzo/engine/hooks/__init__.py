"""Hooks that torch calls while a model runs, and that drive the schedule.

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

Read forward_hooks and backward_hooks, and hooks, which has both; module_tree, which a forward asks for modules and
parameters that have come to the model after it was sharded. What watches outputs and saved weights is in
`autograd`; hooks around an optimizer's step are in `optim/driver`.
"""
