"""What a run writes into its folder, and how it is read back.

run_folder       the names of the files
sinks            write metrics: `metrics.jsonl` and TensorBoard
step_record      what a record of steps says
records          read `metrics.jsonl` back
exit_note        how the run ended
torchrun_report  why a rank failed, for torchrun
"""
