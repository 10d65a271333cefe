"""A run in memory: all that it has, opened or taken up, and what is saved of it.

share      which sequences a rank reads, and what of its sums counts
reference  log-probabilities of the model before its first step, for DPO
progress   how far it has come
session    the objects of a run, and what a checkpoint has of them
first_use  what libraries load at a first step, loaded before it
opening    a session built, or taken up from a checkpoint
"""
