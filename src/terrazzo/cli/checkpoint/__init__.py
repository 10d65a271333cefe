"""`terrazzo checkpoint VERB`: `commands` has the options of the verbs, a file of its own what each does."""
