"""Channels of which each rank has a part, from a `colwise` to a `rowwise`: followed through a forward.

cut_dim         the dim of a tensor that ranks have in parts
split_views     what a view makes of it
moved_dims      what other functions make of it that move dims, take parts of them or put them together
channel_rules   what any of torch's functions makes of it; which would compute something else than on one rank
channel_parts   the watch of first forwards
"""
