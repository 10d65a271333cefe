"""What is put around forwards of units: before a model is sharded, or, of compilation, after that too.

It goes around the unit's own `forward`, inside the hooks: recomputation happens while the unit's weights are gathered
for its backward, and compiled graphs never see the engine.

    layered_forward           a forward with layers around it
    activation_checkpointing  what it keeps for backward, and what runs again
    compiled_units            compilation, unit by unit

Read them in that order.
"""
