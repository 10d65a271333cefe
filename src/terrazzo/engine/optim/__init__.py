"""The optimizer's side: stock `torch.optim` optimizers over flat runs of master weights.

Read template, segment, settings, stock, stepper, probe, elementwise, kept, narrow_steps, matrix_owners, matrix_steps,
on_device, groups, clipping, zeroing, driver, in that order; protocols is what the driver asks of later folders.
"""
