"""`terrazzo plan`: how its arguments become an answer.

options    the options, a row each: what the help says, and which field of the planner's `Request` one is
values     numbers as people write them, and options by the names that other tools have for them
arguments  all arguments with their types: `PlanArguments`, and the source of the model
command    the command, whose signature is made of the rows
answer     from the arguments to the answer, the files and what is printed
of_config  the answer for a configuration of `terrazzo train`
files      what is written: a configuration, and a model's config.json
"""
