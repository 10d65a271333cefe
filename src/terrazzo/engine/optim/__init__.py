"""The optimizer's side: stock `torch.optim` optimizers over flat runs of master weights.

Read template, segment, settings, stock, stepper, probe, elementwise, kept, owners, matrices, groups, driver, clipping,
zeroing, in that order; protocols is what the driver asks of later folders.
"""
