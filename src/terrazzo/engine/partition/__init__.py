"""A model taken apart: which modules are units, which unit owns each parameter, and what a rank holds of it.

    rectangles         rectangular parts of tensors, and those that a flat range is made of
    box                the part of a parameter that a rank holds along `tp` or `ep`
    absent_parameters  what stands for parameters of stages that other ranks run: drawn here too, then dropped
    layer_lists        lists of layers, and the blocks that stand in them
    repeated_blocks    blocks that repeat in the lists of a model
    asked_units        units that a user asks for, by class or name
    unit_choice        which modules are units
    unit_members       which unit owns each parameter, and what is known of it
    unit_sizes         whether one unit is most of the model
    packed_members     which frozen matrices of a unit are kept in 4 bits

Read them in that order. `rectangles` and `box` are arithmetic; the others look at modules, and allocate nothing.
"""
