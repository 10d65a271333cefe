"""`terrazzo plan`: how its arguments become an answer.

options      the table of all options, each declared once: its type, its help, its field of the planner's `Request`
values       parses numbers as people write them, and knows what other tools call the options
sources      what describes the model: a configuration, a name, or a bare number
command      the command; its parameters are made from the table of options
answer       from the arguments to the answer, the files and the output
plan_config  the answer for a configuration of `terrazzo train`
files        the files that it writes: a configuration, and a model's config.json
"""
