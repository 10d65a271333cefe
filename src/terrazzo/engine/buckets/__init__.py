"""What is in memory: the states of the parameters that move together, and what is done with them.

Read buffer; codec, narrow and rounding, states in 8 bits; nf4 and packed, frozen weights in 4; wire, weights as they
are sent in 8 bits; unreduced, summed, finished and gradient, a gradient's life; full and bucket, unit_weights and unit;
then parameter and edits, how a user's parameters are views of it and what is written into them; aliases, tensors of
users in the same memory.
"""
