"""Tensor parallelism: ranks along `tp` have parts of the same matrices.

What a plan is, from globs to a model that is cut:

    styles                what one module does
    model_plans           the plans that models bring themselves
    tensor_cuts           what a plan changes of a model
    read_plan             which module has which style, and which part of its parameters each rank gets
    plan_rules            which plans have right sums and gradients
    apply_plan            the parameters are replaced, and the hooks added
    compare_with_whole    `tz.parallel.check`: the cut model against the whole one

What modules do in a forward:

    activation_exchanges  the sums and gathers, and those of their gradients
    sequence_split        sequences in parts between matrices, from the first block of a run to its last
    module_hooks          whole inputs, gathered outputs
    linear_forwards       linear layers with a part of their inputs, or that compute some of their outputs
    embedding_rows        tables of which a rank has some rows
    vocabulary_loss       cross-entropy of logits by vocabulary
    float8_scales         one scale for a matrix of which no rank has all
    arguments             which argument is the activation

What is watched, since it would give wrong numbers without an error:

    same_inputs           ranks that see other data
    dropout               ranks that drop the same, or other, activations
    first_forwards        how the first forwards of a model are watched
    gradient_parts        operations that mix parts of a gradient with all of it
    channels/             operations that take a rank's channels for all of them, between a `colwise` and a `rowwise`
    direct_weight_use     code that computes with a part of a weight without calling its module
"""
