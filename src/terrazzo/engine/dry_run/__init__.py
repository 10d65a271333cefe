"""A dry run of a step: memory and traffic, known before anything is allocated or sent.

Read step, bill, promise, in that order.
"""
