"""What is done with a configuration. `understand` comes first, the others go on from what it gives.

understand       from a file to what it means
explain          what it means, line by line, with who set each value
check            what is wrong with it before a process is started
convert          the same in another dialect, with a verdict for every key
diff             what two configurations mean differently
precision_table  every tensor's dtype, and what the dtypes cost in memory
emit             a written document as text
comments         those of a YAML file, kept at their keys
"""
