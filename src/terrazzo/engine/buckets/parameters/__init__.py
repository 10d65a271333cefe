"""Parameters as users see them, and what users do to them.

    note             what the engine has noted on a parameter
    gradient_hooks   hooks that look at its gradients, users' own and the engine's
    wanted_gradients parameters that torch.autograd.grad and backward(inputs=...) are given
    placeholder      tensors that have a shape, a dtype and a device, and no values
    at_rest          what a parameter looks like while its values are elsewhere
    outside_forward  parameters that a loss may not compute with past the model's forward
    edits            what is written into parameters, or given to them as `data`
    aliases          tensors of users in memory that is the engine's

Read them in that order.

A parameter of a sharded model is one object throughout. Its class and its memory change, all of a bucket's at once; one
is split where its full weights come and go, else whole (`BucketSpec.resident`):

    moment                                         its class                       its values are in
    before `tz.shard`                              the user's                      memory of its own
    split, at rest                                 AtRest: refuses to be read      none: `FullMemory` has no bytes
    split, in its unit's forward or backward,      the user's, with `.data` that   `FullMemory`
      or in `tz.gathered`                            is noticed: `at_rest._linked`
    split, between forward and backward            as in forward, or AtRest where  `FullMemory`, or none
                                                     backward gathers again
    whole                                          as split ones in forward        `Bucket.weight`, at rest
    whole, while an update in the background       AtRest                          the same, which is being written
      changes it
    whole, while new values are on their way       Arriving: waits for them        the same, which is being written
    any that can be read, where no loss may        that class, watched:            as before
      compute with it                                `outside_forward`
    given other `data`, until it is taken over     as before                       what the user has given
    of a stage that other ranks run                no parameter: an `Absent`       none

Memory that a user still holds after `tz.gathered` is left to that user, and `FullMemory` takes other.

On each is a `Note`, made with the bucket's `FullWeights`. What it says, and who says it:

    name, split, alias               FullWeights, for good
    reach                            the model's `ForwardHooks`, for good
    measure                          `let_measure`, for good
    arrive                           the last `Guard.close` with new values on their way
    refuses                          `OutsideForward`, from `close` to `open`
    loss_scale                       `give_unscaled`, under fp16, for good
    accumulate_hook, gradient_hooks  the engine's hooks as they are registered
"""
