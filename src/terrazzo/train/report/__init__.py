"""What a run says: its header, a row for each log step, and at the end what to open and how to go on.

On screen is what decides whether to let it run; all else is in the run's folder: `plan.txt`, `metrics.jsonl` and
`report.html`.

run_report    all that is said, moment by moment
run_screen    how it stands on the screen
log_files     what is written
log_window    what is measured between two rows of the log, and the numbers of a row
mesh_picture  the mesh as a line of text
"""

from terrazzo.train.report.log_window import LogWindow
from terrazzo.train.report.run_report import RunReport

__all__ = ["LogWindow", "RunReport"]
