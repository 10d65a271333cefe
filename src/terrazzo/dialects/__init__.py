"""Other people's configurations: read into one neutral description, and written from it.

Open to other packages:

    accelerate.launched, deepspeed.keys                             what doors for these libraries read besides a file
    check, convert, diff, emit, explain, precision_table, verdict   the verbs of the command line
    description, dialect, meaning, registry, understand             from a file to its meaning
"""
