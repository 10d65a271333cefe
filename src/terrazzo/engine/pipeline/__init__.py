"""A model in stages, of which each rank runs some: `terrazzo.parallel` cuts it and runs it, the engine takes part.

    stages             the stages of a model that this rank runs, and their turns in a step
    pipeline_schedule  the schedule with several micro-batches under way: what moves as stages take turns
    staged_step        one step, as what runs the stages tells the engine of it

To a model that is not in stages none of this applies. What stands for the parameters of other stages is
`partition/absent_parameters`.
"""
