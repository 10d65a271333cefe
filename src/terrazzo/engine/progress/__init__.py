"""What is known of a training beside its weights: how far it has come, what gradients are multiplied and divided by.

    loss_scale         fp16: the number, which grows and shrinks step by step; steps that overflow are skipped
    scaled_passes      its way into a pass and out of it: inputs, outputs, and gradients that lack it
    denominator        what finished sums of gradients are divided by: ranks or the user's number, and the loss scale
    noted_numbers      hyper-parameters as a step has used them, and factors of gradients
    training_progress  steps, these numbers, and what gradients went through: ranks must have all of it alike
    raised_passes      forwards and backwards that raised on this rank, until gradients are forgotten

Read them in that order. A model has one `Progress`, made by `sharding.shard`, and in it one `Denominator`;
`consensus.pass_end` compares them at the end of each pass. Who opens what:

    each forward and backward  `Denominator.passes`, by `hooks` and by stages of a pipeline; `RaisedPasses`, of `hooks`
    a sum that is finished     `Denominator.divisor`, by `schedule`
    optimizer.step()           `LossScale.skips`, then `Progress.count_step`, by `optim.driver`
    an optimizer comes, goes   `Denominator.scale_by`, by `model.drivers`: each has a loss scale of its own
    gradients are edited       `Progress.note`, by `interception.gradients`, `model.gradients` and `optim.zeroing`
    zero_grad()                the same, and `RaisedPasses.gradients_zeroed`
"""
