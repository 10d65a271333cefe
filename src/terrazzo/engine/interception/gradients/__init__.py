"""What `parameter.grad` shows of gradients that lie in the engine's memory, on several ranks.

    gradient_answers   what is answered of them: norms over all ranks, changes in place
    gradient_stand_in  what stands in `.grad`: a tensor without values, which asks these
    shown_gradients    those of one bucket, set and taken away
    grad_edits         what users set `.grad` to, or drop there
    grad_attribute     when all of a model are shown, from the end of a backward to the begin of the next

Read them in that order; the entry is `grad_attribute.show_gradients`.
"""
