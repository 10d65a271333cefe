"""What is in memory: the states of the parameters that move together, and what is done with them.

Read buffer, gradient, bucket, unit, in that order.
"""
