"""`terrazzo checkpoint VERB`: `commands` has the options of all verbs, a file of its own what each does.

commands  the verbs with their options
options   what `convert` takes, as values
inspect   what is in a checkpoint, or which are in a folder
verify    its files against their digests
diff      two checkpoints compared
prune     old checkpoints of a folder removed
convert   a checkpoint in another format
progress  the bar that shows how far a verb is
text      what the verbs print, as lines and tables
"""
