"""The optimizer's side: stock `torch.optim` optimizers over flat runs of master weights.

Read segment, stock, optimizer, sharded, clipping, foreign, in that order; around is what the driver asks of later
folders.
"""
