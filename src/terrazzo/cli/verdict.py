"""`terrazzo verdict RUN`: what bounds the step of a run, and the edit that would help."""

from __future__ import annotations

from terrazzo.cli.shared.arguments import AsJsonOption, RunArgument

__all__ = ["verdict"]


def verdict(run: RunArgument, as_json: AsJsonOption = False) -> None:
    """Say what bounds the step of a run, and the edit that would help.

    The run may go on meanwhile: what it has written so far counts. Tables of where the time of a step goes stand below.
    """
    from terrazzo.cli.shared.terminal import columns, say, say_json
    from terrazzo.errors import BadInput
    from terrazzo.train.report.run_review import RunReview  # the trainer, which other verbs do without

    review = RunReview(run)
    bound, sizing = review.verdict(), review.sizing()
    if bound is None:
        raise BadInput(f"'{run}' has no record of a step yet: wait for its first log step, or lower log.every.")
    if as_json:
        say_json(bound.as_dict() | {"sizing": None if sizing is None else sizing._asdict()})
        return
    say(str(bound), "bold")
    for table in review.tables():
        say(f"\n{table.title}\n{columns([table.head, *table.rows], '<' + '>' * (len(table.head) - 1))}")
    if sizing is not None:
        say(f"\n{sizing.sentence}")
        if (sizes := sizing.table) is not None:
            say(columns([sizes.head, *sizes.rows], "<" + ">" * (len(sizes.head) - 1)))
