"""A model in stages, of which each rank runs some: `terrazzo.parallel` cuts it, the engine reads this of it.

    stages             which layers this rank runs, and when
    absent_parameters  what stands for the parameters of the others

When stages run is `schedule/pipeline`; to a model that is not in stages none of this applies.
"""
