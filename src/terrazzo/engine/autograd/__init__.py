"""What a forward leaves behind, in autograd's graph and on modules.

    outputs        tensors in what a forward returns
    asides         tensors that modules have put aside in it, such as an auxiliary loss
    listeners      functions that torch calls: each reaches whom it tells through a weak reference
    announcements  hooks on those tensors, which tell that backward comes to a unit
    saved_weights  weights that autograd has kept for backward: gathered again when it reads them
    recomputed     which units run again together, inside of one `torch.utils.checkpoint`
    weight_copies  copies of gathered weights, for whoever keeps them longer than they are here

Read them in that order.
"""
