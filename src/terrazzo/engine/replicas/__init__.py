"""Replicas that train by themselves (`plan/diloco`), and the outer steps that join their weights.

    outer_exchange  outer gradients of some elements: the mean over replicas, and what that holds and sends
    outer_weights   the weights of an outer step, on their way to where the optimizer's are; what that holds and sends
    rounds          which outer step is due, and the steps themselves; what is compared as a round begins

Read them in that order. `dry_run/outer_steps` adds up what these say of outer steps that have not run.
"""
