"""What a run prints and writes: its header, a row per log step, and at the end what to open and how to continue.

The screen shows what one needs to decide whether to let the run go on; everything else is in the run's folder:
`plan.txt`, `metrics.jsonl` and `report.html`.

run_report    everything that is reported, event by event
run_screen    the layout of the screen
log_files     the files that are written
log_window    measures the steps between two rows of the log
mesh_picture  the mesh as a line of text
summary       what was promised beside what was measured, at the end of a run
stop_notices  what is said when a run is stopped

What the folder says of a run, while it runs and afterwards:

run_review    reviews a run: its verdict, its tables and its page
rank_count    whether a run has too many ranks or too few
"""

from terrazzo.train.report.log_window import LogWindow
from terrazzo.train.report.run_report import RunReport

__all__ = ["LogWindow", "RunReport"]
