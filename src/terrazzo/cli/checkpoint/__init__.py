"""`terrazzo checkpoint VERB`: `commands` has the options of the verbs, a file of its own what each does.

Its modules:

    commands  the options of all verbs
    inspect   what is in a checkpoint
    verify    its files against their digests
    diff      two checkpoints compared
    prune     old checkpoints of a run deleted
    convert   a checkpoint in another format
    progress  how far a verb is
    text      what the verbs print
"""
