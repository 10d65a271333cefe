"""Pipeline parallelism: ranks have other layers of the same model.

Read order first, what each rank runs and when; line, a model's forward as one stage of it; messages, what stages send;
failures, how ranks hear of one that has failed; pipeline_step, which brings these together; and stages, how a model is
cut.
"""
