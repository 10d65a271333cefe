"""`terrazzo checkpoint VERB`: `commands` has all verbs with their options; each verb's work is in the file of its name.

commands  the verbs with their options
options   the options of `convert` as values
inspect   shows what is in a checkpoint, or which are in a folder
verify    checks files against their digests
diff      compares two checkpoints
prune     removes old checkpoints of a folder
convert   writes a checkpoint in another format
progress  the progress bar of a verb
text      lines and tables that the verbs print
"""
