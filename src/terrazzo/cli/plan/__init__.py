"""`terrazzo plan`: how its arguments become an answer.

options      all arguments with their types, each option declared once: what the help says, and which field of the
             planner's `Request` it is
values       numbers as people write them, and options by the names that other tools have for them
sources      what describes the model: a configuration, a name, a bare number
command      the command, whose parameters are made of the options
answer       from the arguments to the answer, the files and what is printed
plan_config  the answer for a configuration of `terrazzo train`
files        what is written: a configuration, and a model's config.json
"""
