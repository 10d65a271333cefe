"""Experts of the same layers that ranks share along `ep`.

Read ranks first, how tokens go to experts and back; rows, the order in which they are computed; stacked, experts whose
matrices are one tensor; and sharing, how a model is told.
"""
