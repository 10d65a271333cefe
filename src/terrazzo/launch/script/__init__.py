"""Ranks that run a user's script in place of the trainer: `terrazzo run`.

start_script  starts the script as ranks
script_rank   one rank
"""
