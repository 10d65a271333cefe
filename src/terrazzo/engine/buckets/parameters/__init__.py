"""Parameters as users see them, and what users do to them.

    note             what the engine has noted on a parameter
    gradient_hooks   hooks that look at its gradients, users' own and the engine's
    placeholder      tensors that have a shape, a dtype and a device, and no values
    at_rest          what a parameter looks like while its values are elsewhere
    outside_forward  parameters that a loss may not compute with past the model's forward
    edits            what is written into parameters, or given to them as `data`
    aliases          tensors of users in memory that is the engine's

Read them in that order.
"""
