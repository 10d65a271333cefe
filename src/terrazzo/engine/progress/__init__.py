"""What changes from step to step of a training, and ranks must have alike; `consensus.pass_end` compares it.

    loss_scale         fp16: gradients are multiplied inside of the model, and steps that overflow are skipped
    denominator        what finished sums of gradients are divided by
    noted_numbers      hyper-parameters as a step has used them, and factors of gradients
    training_progress  how far the training has come on this rank: steps, these numbers, and what gradients went through

Read them in that order.
"""
