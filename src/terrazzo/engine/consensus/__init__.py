"""What ranks must have alike, what they agree on, and where they meet for it.

Read loss_scale, hyper_parameters and progress, the numbers of a training; pass_end, where ranks meet and compare them;
agreement, what they agree on there; row_exchanges, where they meet besides.
"""
