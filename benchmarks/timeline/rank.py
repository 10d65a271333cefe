"""A rank's process: `python -m benchmarks.timeline.rank JOB RANK`. The device comes before torch, which asks once.

The first rank prints an outcome as JSON on each line.
"""

from __future__ import annotations

import json
import sys

import hostcuda


def main(job_path: str, rank: int) -> None:
    """Runs a job that `suite` has written."""
    hostcuda.load()
    from torch.distributed import destroy_process_group

    from benchmarks.timeline.axes import exchanged
    from benchmarks.timeline.measure import join, outcomes
    from benchmarks.timeline.staged import stages

    with open(job_path) as file:
        job = json.load(file)
    join(job, rank)
    found = exchanged(job) if "axes" in job else stages(job) if "schedules" in job else outcomes(job)
    for outcome in found:
        if rank == 0:
            print(json.dumps(outcome), flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
