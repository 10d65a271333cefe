"""What is behind a term: its formula, the numbers put in, and where the formula is from."""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.errors import BadInput
from terrazzo.messages import GIB, did_you_mean
from terrazzo.planner.figures import MemoryFigures, Term
from terrazzo.planner.report.all_formulas import FORMULAS
from terrazzo.planner.report.blocks import TextBlock, TextLine
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.schema import ExplainedReport, ExplainedTerm
from terrazzo.planner.report.words import LABELS, seconds_text

__all__ = ["explain", "explained"]


def explained(estimate: Estimate, wanted: str) -> ExplainedReport:
    """Every term of that name or formula.

    Args:
        wanted: name of a term (`gathered`, `gathered weights`), key of a formula (`memory.gathered`), or its last part.

    Raises: `BadInput` with all names where nothing is called so.
    """
    terms = list(_terms(estimate))
    matching = [(part, term) for part, term in terms if wanted.lower() in _names(term)]
    if not matching:
        names = list(dict.fromkeys(term.name for _, term in terms))
        raise BadInput(f"This plan has no term {wanted!r}.{did_you_mean(wanted, names)} Terms: {', '.join(names)}.")
    return ExplainedReport(terms=tuple(_explained(part, term) for part, term in matching))


def explain(report: ExplainedReport) -> list[TextBlock]:
    """The terms as people read them."""
    return [block for term in report.terms for block in _blocks(term)]


def _terms(estimate: Estimate) -> Iterator[tuple[str, Term]]:
    parts = {
        "memory": estimate.memory.terms,
        "host memory": estimate.memory.host_terms,
        "disk": estimate.memory.disk,
        "disk writes": estimate.memory.disk_writes,
        "traffic": estimate.traffic.collectives,
        "time": estimate.time.terms if estimate.time else (),
        "totals": _totals(estimate.memory),
    }
    return ((part, term) for part, terms in parts.items() for term in terms)


def _totals(memory: MemoryFigures) -> tuple[Term, ...]:
    """What is counted beside tensors, as terms."""
    inputs = {"allocated": memory.allocated_bytes}
    if memory.capacity_bytes is not None:
        inputs["memory of the device"] = float(memory.capacity_bytes)
    totals = {"reserved": memory.reserved_bytes, "device": memory.expected_bytes, "upper": memory.most_bytes}
    upper = {"upper values, at the moment expected to be the fullest": sum(term.upper for term in memory.terms)}
    given_by = dict.fromkeys(totals, inputs) | {"upper": inputs | upper}
    return tuple(Term(name, value, value, f"memory.{name}", given_by[name]) for name, value in totals.items())


def _names(term: Term) -> tuple[str, ...]:
    label = LABELS.get(term.name, term.name)
    return label.lower(), term.name.lower(), term.formula.lower(), term.formula.lower().rpartition(".")[2]


def _explained(part: str, term: Term) -> ExplainedTerm:
    formula = FORMULAS[term.formula]
    return ExplainedTerm.of(term, part=part, text=formula.text, source=formula.source)


def _blocks(term: ExplainedTerm) -> Iterator[TextBlock]:
    yield TextLine(f"{term.name} ({term.part})", "bold")
    yield TextLine(f"  {term.formula} = {term.text}")
    width = max((len(name) for name in term.inputs), default=0)
    for name, value in term.inputs.items():
        yield TextLine(f"    {name:<{width}} = {_number(value)}")
    yield TextLine(f"  {'at most' if term.name == 'upper' else 'expected'}: {_amount(term.value, term.unit)}")
    if term.upper != term.value:
        yield TextLine(f"  at most: {_amount(term.upper, term.unit)}")
    yield TextLine(f"  source: {term.source}\n")


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def _amount(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.6g} s = {seconds_text(value)}"
    return f"{value:,.0f} bytes = {value / GIB:,.3f} GiB = {value / 1e9:,.3f} GB"
