"""The optimizer's side: stock `torch.optim` optimizers over flat runs of master weights.

Read segment, stock, optimizer, sharded, clipping, zeroing, unattached, in that order; protocols is what the driver asks
of later folders.
"""
