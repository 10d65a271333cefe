"""`terrazzo config VERB`: `commands` has the verbs, `text` what they print."""
