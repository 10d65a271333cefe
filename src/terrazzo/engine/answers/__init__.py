"""What parameters, gradients and methods of a sharded model answer a training loop that knows nothing of it.

Read module, the model's own class; stand_in, `parameter.grad`, with by_hand and factors, what is set and what it is
multiplied by; measured, norms and sums of what no rank has whole; and methods, which run as a forward does.
"""
