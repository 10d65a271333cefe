"""What parameters, gradients and methods of a sharded model answer a training loop that knows nothing of it.

Read module, the model's own class; loading, hooks around its state dict; gradients and stand_in, `parameter.grad`;
measured, norms and sums of what no rank has whole; and methods, which run as a forward does.
"""
