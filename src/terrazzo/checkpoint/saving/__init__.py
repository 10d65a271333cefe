"""From a sharded model to a complete folder.

save            a checkpoint that is written before training goes on
background      one that is written while training goes on: `Saver`
snapshot        what is saved, and the copy of it
extra           values of the user's own, as JSON
job             what a rank writes, wherever it is written
staging         memory that the copy lies in for the process that writes
writer_process  that process, as the rank sees it
writer_main     the process itself
"""
