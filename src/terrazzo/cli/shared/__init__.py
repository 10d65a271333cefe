"""What all verbs have.

verb           the class of a command; answers to options that it does not have
arguments      arguments and options that several commands have
parameters     parameters of a command whose options are rows of a table
terminal       lines, tables and JSON as they are printed
written_files  a configuration with comments, and a model's config.json
unread         a reader of what is printed may leave: `terrazzo ... | head`
"""
