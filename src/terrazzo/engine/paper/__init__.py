"""A step on paper: memory and traffic, known before anything is allocated or sent.

Read rehearsal, bill, promise, in that order.
"""
