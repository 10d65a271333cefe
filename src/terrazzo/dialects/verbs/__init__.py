"""What is done with a configuration: `understand` reads a file, `explain`, `check`, `convert` and `diff` go on from it.

`precision_table` says what dtypes cost; `emit` and `comments` make the text of what `convert` writes.
"""
