"""`deepspeed.runtime`: what scripts take from inside DeepSpeed.

engine        what `initialize` returns
dataloader    the data loader that it returns for `training_data`
lr_schedules  learning-rate schedules
"""

from terrazzo.integrations.deepspeed.absent import absent_names

__getattr__ = absent_names(__name__)
