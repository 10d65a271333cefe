"""A script of the user's own in the place of the trainer: `terrazzo run`.

start_script  how it is started as ranks
script_rank   one rank of it
"""
