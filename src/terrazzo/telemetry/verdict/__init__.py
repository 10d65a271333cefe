"""What bounds the step of a run, in one sentence, by its records.

bounds   what may bound a step, and the words for each
edits    the edit that helps against each bound
verdict  which it is, with its number
"""
