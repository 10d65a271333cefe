"""What is done with a session step by step.

step      an optimizer step, forward and backward of its micro-batches
evaluate  validation, and samples of text
judge     whether one is like those before it, and what is done about one that is not
cadence   when one is saved
"""
