"""What is done with a session step by step.

step        an optimizer step, forward and backward of its micro-batches
evaluate    validation, and samples of text
guard       steps that are left out, judged before their update
divergence  losses and norms that are not finite
cadence     when one is saved
"""
