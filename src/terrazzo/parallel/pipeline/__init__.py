"""Pipeline parallelism: ranks along `pp` have other layers of the same model.

Before training:

    model_line                  the modules that a model's values go through, as models say themselves
    cut_into_stages             `Pipeline`: how a model is cut, and which stages this rank has

In a step:

    step                        `tz.step`
    step_arguments              all ranks compare what they were given
    schedules                   what each rank runs, and in which order
    micro_batches               the model and the loss function, called with one of them
    schedule_runner             a rank runs its part of that
    stage_links                 how ranks reach each other, from step to step
    pipeline_stages             the model's stages, which of them this rank has, and how far a forward has come
    stage_forward               a model's forward as that of one stage
    absent_values               outputs of modules that other ranks run
    messages                    activations and gradients between stages
    deferred_weight_gradients   gradients of weights that are computed later
    failures                    how ranks learn which of them has failed
    buffer_snapshot             buffers as they were before a step that fails
"""
