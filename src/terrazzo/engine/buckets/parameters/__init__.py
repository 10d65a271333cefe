"""Parameters as users see them, and what users do to them.

    parameter   what a parameter looks like while its values are elsewhere; what the engine has noted on it
    edits       what is written into parameters, or given to them as `data`
    aliases     tensors of users in memory that is the engine's

Read them in that order.
"""
