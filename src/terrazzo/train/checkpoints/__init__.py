"""What a run saves, keeps, goes on from, and exports at its end.

local_folder       the folder of local checkpoints on a host: where it is, whose, and what is in it
local_checkpoints  local checkpoints, in memory or on a drive of each host: saved, copied, removed
resume             what a run goes on from, and what differs from it
restart_points     what it goes on from when its ranks are started again after a failure
run_checkpoints    who may write to the folder, saving, and which checkpoints stay: `RunCheckpoints`
export             the trained model as a Hugging Face folder
"""
