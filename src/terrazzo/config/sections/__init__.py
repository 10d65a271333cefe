"""The sections of the configuration, each in the module of its name.

A section within one, such as `plan.mesh`, is in the module of the outer one; `model.attention` and `model.experts` have
modules of their own.

model       which model is trained
attention   `model.attention`: how far the tokens of the built-in decoder see
experts     `model.experts`: the built-in decoder's mixture of experts
lora        adapters on a frozen model
data        where the text comes from, and how it becomes tokens
objective   what the model learns
plan        the row of the table, and with `plan.mesh` how the ranks are arranged
parallel    what the axes of tensor, context, pipeline and expert parallelism do
offload     states that are not on the device
precision   every dtype of a run
batch       sizes in sequences and tokens
optimizer   what updates the weights
schedule    the learning rate over the run
train       the loop
guard       what is done about a step that is not like those before it
checkpoint  when a run is saved, where, and what a new start does with what is there
launch      how its ranks start
log         what it writes
"""
