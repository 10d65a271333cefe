"""What a forward leaves behind, in autograd's graph and on modules.

Read outputs and asides, the tensors that it hands over; listeners and announce, what tells by them that backward comes
to a unit; saved, what autograd keeps of weights, and recomputed, what it runs again; copies, of weights whose memory
goes; module_tree, whether modules are still those that were sharded.
"""
