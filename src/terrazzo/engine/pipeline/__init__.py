"""A model in stages, of which each rank runs some: `terrazzo.parallel` cuts it, the engine reads this of it.

    stages             the stages of a model that this rank runs, and their turns in a step
    absent_parameters  what stands for the parameters of the others, which are drawn here too, then dropped

When stages run is `schedule/pipeline`; to a model that is not in stages none of this applies.
"""
