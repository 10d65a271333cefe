"""A sharded model as one object.

`Engine` is what `tz.shard` builds; whoever else acts on a model asks it. What a user calls, and where that arrives:

    model(x)                              hooks             ForwardHooks.before_model; the engine is not asked
    with tz.accumulate(model)             training_calls    sets what becomes of the next backwards' gradients
    loss.backward()                       hooks             BackwardHooks.start, by the first hook that torch calls
    tz.clip_grad_norm_(model, 1.0)        gradients         ModelGradients.clip: norms over all ranks, one factor
    optimizer.step()                      engine            before_step, publish and after_step; see `optim`
                                          replicas          before the first of a round: Rounds.begin
                                                            after the last, and where replicas stream within
                                                            it: Rounds.run
    tz.EMA(model).update()                ema               Average.update: the average follows the master weights
    with tz.gathered(model, write=True)   gathered_blocks   settle, full weights, of which what is written is taken over
    model.state_dict(), a checkpoint      engine            settle: all is at rest; then `states` reads it

    engine            one sharded model: its units, their schedule, and what can be asked of them
    description       what a sharded model is, as text
    gradients         all gradients, between backwards and steps
    gathered_blocks   blocks inside which users have full weights
    requirements      what calls require of weights and states, in one table
    drivers           what steps the model: put on it, and let go of
    weight_average    a moving average of master weights, this rank's part
    ema               the average as a training loop has it
    training_calls    tz.accumulate, tz.clip_grad_norm_, tz.gathered: what they are given, and its checks
    unused_gradients  backwards that no step uses

Read them in that order.
"""
