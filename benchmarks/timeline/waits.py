"""What the stream that computes waits for: whenever it is idle, the work that leads to its next kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostcuda.virtual import Span

__all__ = ["waits"]


def waits(spans: Sequence[Span], begin_s: float, end_s: float) -> dict[str, float]:
    """Seconds between two moments in which that stream runs no kernel, by what it waits for.

    At the end of such a time some other work ends; before that ran what it had waited for itself, and so on. What is
    copied by that stream counts as waited for.
    """
    lasting = (span for span in spans if span.end_s > span.begin_s)
    ends = {span.end_s: span for span in sorted(lasting, key=_is_computation, reverse=True)}
    found: dict[str, float] = {}
    for idle_s, until_s in _idle(spans, begin_s, end_s):
        while until_s > idle_s:
            last = ends.get(until_s)
            if last is None or _is_computation(last):
                raise ValueError(f"nothing ends at {until_s}, when computation goes on")
            found[last.what] = found.get(last.what, 0.0) + until_s - max(last.begin_s, idle_s)
            until_s = last.begin_s
    return found


def _is_computation(span: Span) -> bool:
    return span.what == "kernels"


def _idle(spans: Sequence[Span], begin_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    for span in sorted(filter(_is_computation, spans), key=lambda span: span.begin_s):
        if (until_s := min(span.begin_s, end_s)) > begin_s:
            yield begin_s, until_s
        begin_s = max(begin_s, span.end_s)
    if end_s > begin_s:
        yield begin_s, end_s
