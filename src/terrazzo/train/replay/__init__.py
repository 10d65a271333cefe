"""Whether ranks compute what others compute of the same data.

disagreement    who is wrong, by the answers of all
replay          ranks give them
memory          whether it changes by itself
replica_checks  when, and what of the run is not to be trusted
"""
