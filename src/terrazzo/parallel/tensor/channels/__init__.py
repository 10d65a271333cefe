"""Channels of which each rank has a part, from a `colwise` to a `rowwise`: followed through a forward.

cut_dim         the dim of a tensor that ranks have in parts
split_views     what a view makes of it
places          what reads and writes by places make of it
moved_dims      what other functions make of it that move dims, take parts of them or put them together
channel_rules   what any of torch's functions makes of it that has a rule; which would compute other than on one rank
elementwise     whether a function without a rule computes element by element, as its operators say
channel_marks   which tensors of a forward have channels in parts
channel_parts   the watch of first forwards
"""
