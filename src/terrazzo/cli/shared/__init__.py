"""What several verbs use.

verb           the class of a command, and answers to options that it does not have
arguments      arguments and options that several commands have
parameters     turns rows of a table into a command's parameters
terminal       prints lines, tables and JSON
written_files  writes a configuration with comments, and a model's config.json
unread         ends a command whose output nobody reads any more: `terrazzo ... | head`
"""
