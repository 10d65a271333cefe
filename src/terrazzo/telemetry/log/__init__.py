"""What a run writes of itself into its folder, and how it is read back.

run_folder       the files of the folder
sinks            the files that get the numbers of a step
records          these read back
exit_note        how a run has ended
torchrun_report  why a rank has failed, for torchrun
"""
