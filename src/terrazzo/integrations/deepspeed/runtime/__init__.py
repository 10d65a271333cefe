"""`deepspeed.runtime`: what scripts take from inside DeepSpeed.

engine        what `initialize` returns
dataloader    the data loader that it returns for `training_data`
lr_schedules  learning-rate schedules
"""
