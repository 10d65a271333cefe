"""`terrazzo config VERB`: `commands` has the verbs, `options` what they share, a file of its own what each does."""
