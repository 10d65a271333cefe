"""Scripts of other libraries, run as they are and on Terrazzo: `scripts.toml` is the table, `__main__` runs it."""
