"""What a run saves, keeps, goes on from, and exports at its end.

keeping  who may write to the folder, saving, and which checkpoints stay
local    further checkpoints in memory, or on a drive, of each host
resume   what a run goes on from, and what differs from it
export   the trained model as a Hugging Face folder
"""
