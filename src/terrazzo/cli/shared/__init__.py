"""What several verbs use.

verb           the class of a command, and answers to options that it does not have
arguments      arguments and options that several commands have
options        options that are rows of a table
terminal       prints lines, tables and JSON
written_files  which files are refused before any work, and the texts of those for the trainer
unread         ends a command whose output cannot be written: `terrazzo ... | head`, or a full disk
interrupted    what is said of Ctrl-C before anything was started
"""
