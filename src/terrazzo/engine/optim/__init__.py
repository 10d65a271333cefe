"""The optimizer's side: stock `torch.optim` optimizers over flat runs of master weights.

Read segment, settings, stock, probe, elementwise, stepper, driver, clipping, zeroing, in that order; protocols is what
the driver asks of later folders.
"""
