"""What to change of a request that does not fit, the smallest change of each kind first, and what of it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from terrazzo.engine import PRECISIONS, Plan, StateFormat
from terrazzo.errors import BadInput
from terrazzo.parallel.transformers_support import CHANGED_LOGITS
from terrazzo.planner.choice.edits import Changed, Kinds, best_edits, first_that_fits
from terrazzo.planner.choice.tried_meshes import LONG_SEQUENCE
from terrazzo.planner.report.estimates import Edit, Estimate
from terrazzo.planner.setup.build_setup import MOST_TRIED
from terrazzo.planner.setup.choice_names import MatmulPrecision, precision_text
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["edits_that_fit", "narrower_names", "no_edit", "parted_axes", "wider_edits"]

TRIED_SHARES = (0.75, 0.5, 0.25)
"""Shares of states in host memory that are tried where it is too small for all of them."""

TRIED_TIERS = ("cpu", "cpu-all", "nvme", "nvme-all")


def edits_that_fit(request: Request, misfit: Estimate, estimate: Callable[[Request], Estimate]) -> tuple[Edit, ...]:
    """Up to four ways of changing `misfit`, which `request` means and which does not fit, so that it fits.

    Of each kind of change the smallest is taken with which it surely fits, or else as expected: more recomputed,
    smaller micro-batches, a loss without all logits, states elsewhere, these together or beside tensor and context
    parallelism; states in fewer bits; and more GPUs. The fastest comes first, behind it what rounds states, if that is
    faster, and more GPUs last.
    """
    here, setup = Changed("", request), misfit.setup
    kinds = Kinds(_alone(here, setup), _together(here, setup), _narrower(here, setup), _larger(here, setup))
    return best_edits(kinds, misfit, estimate)


def wider_edits(request: Request, best: Estimate, found: Callable[[Request], Estimate | None]) -> tuple[Edit, ...]:
    """What a search that finds nothing, and comes nearest with `best`, finds with a loss without all logits, offload,
    more kinds of parallelism, fewer bits, more GPUs; and with more of these kinds on more GPUs, where on none it surely
    fits otherwise.
    """
    here, setup, edits = Changed("", request), best.setup, list[Edit]()
    parallel = [] if request.parallel else [also(here, "--parallel", parallel=True)]
    kinds = [
        [also(here, loss="chunked")] if setup.model.computes and _has_logits(here, setup) else [],
        [] if request.offload or request.plan else [also(here, "--offload any", offload=True)],
        parallel,
        [also(here, precision=name) for name in narrower_names(setup)],
    ]
    for kind in kinds:
        edits += first_that_fits(kind, best, found)
    if isinstance(request.gpus, int):
        larger = first_that_fits(on_more_gpus(here, setup), best, found)
        if not any(edit.estimate.memory.fits_surely for edit in larger):
            parted = (change for each in parallel for change in on_more_gpus(each, setup))
            larger += first_that_fits(parted, best, found)
        edits += larger
    return tuple(edits)


def no_edit(setup: Setup) -> str:
    """What to do where no edit helps."""
    tried = (
        "smaller micro-batch, activation checkpointing, chunked loss, offload, states in fewer bits, tp, cp or "
        if setup.model.computes
        else ""
    )
    return (
        f"No {tried}number of GPUs up to {MOST_TRIED} that was tried makes it fit: leave --strategy out, which "
        "compares all of them, with --parallel for other kinds of parallelism beside, and --offload any if states may "
        "leave the device."
    )


_OPTIONS = {"checkpointing": "ac", "micro_batch": "micro-batch"}
"""The option of the command line for a field of a request, where it has another name."""


def also(base: Changed[Request], options: str = "", **fields: Any) -> Changed[Request]:
    """A request changed once more; `options` only where these are not the fields' own."""
    options = options or " ".join(f"--{_OPTIONS.get(name, name)} {value}" for name, value in fields.items())
    return Changed(f"{base.options} {options}".lstrip(), replace(base.made, **fields))


def _alone(here: Changed[Request], setup: Setup) -> Iterator[Iterator[Changed[Request]]]:
    """Changes of one kind, what changes the least first."""
    if setup.model.computes:
        yield _recomputing(here, setup)
        yield _smaller(here, setup)
        if _has_logits(here, setup):
            yield iter([also(here, loss="chunked")])
    yield _elsewhere(here, setup)


def _recomputing(here: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    modes = {"none": ("selective", "full"), "selective_half": ("full",), "selective": ("full",)}
    for mode in modes.get(setup.checkpointing, ("full",) if setup.every > 1 else ()):
        yield also(here, checkpointing=mode)


def _smaller(here: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    """Halves of the micro-batch, and all that a rank has of a batch at once, which has no gradients to add up."""
    for shift in range(1, setup.micro_batch.bit_length()):
        yield also(here, micro_batch=setup.micro_batch >> shift)
    if setup.micro_batches > 1 and here.made.global_batch is not None:
        yield also(here, micro_batch=-(-here.made.global_batch // setup.mesh.batch_ranks))


def _has_logits(here: Changed[Request], setup: Setup) -> bool:
    return here.made.loss is None and setup.loss == "full" and setup.model.family not in CHANGED_LOGITS


def _recomputes_all(setup: Setup) -> bool:
    return setup.checkpointing == "full" and setup.every == 1


def _leanest(here: Changed[Request], setup: Setup) -> Changed[Request]:
    """All recomputed, in the smallest micro-batches."""
    if setup.model.computes and not _recomputes_all(setup):
        here = also(here, checkpointing="full")
    return also(here, micro_batch=1) if setup.model.computes and setup.micro_batch > 1 else here


def _with_leanest(here: Changed[Request], setup: Setup) -> list[Changed[Request]]:
    """As it is, and, where that is another one, as it takes the least."""
    least = _leanest(here, setup)
    return [here, least] if least.options else [here]


def _narrower(here: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    """States in fewer bits, alone and where the rest takes the least."""
    for base in _with_leanest(here, setup):
        for name in narrower_names(setup):
            yield also(base, precision=name)


def narrower_names(setup: Setup) -> tuple[str, ...]:
    """Precisions with a setup's states in fewer and fewer bits, of an optimizer that keeps moments: these in 8 bits,
    and beside them the 16 bits more that make bf16 weights fp32 masters, with gradients in bf16.
    """
    own = setup.precision
    if own.compute.itemsize != 2 or not setup.optimizer.moments or setup.optimizer.moment_bytes is not None:
        return ()
    names = []
    narrow = {} if isinstance(own.moments, StateFormat) else {"moments": StateFormat.INT8}
    pure = PRECISIONS["bf16-pure"]
    halves = {name: getattr(pure, name) for name in ("weight", "reduce", "accumulate", "master")}
    kept = {**halves, **narrow, "rounding": "remainder"} if own.compute == pure.compute else {}
    for changes in (narrow, kept):
        try:
            states = replace(own, **changes)
        except BadInput:  # such as wires that go with other dtypes
            continue
        if states != own:
            names.append(precision_text(MatmulPrecision(states, setup.matmul, setup.recipe)))
    return tuple(names)


def _elsewhere(here: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    """States in host memory or on disks; of a setup that has them there already, fewer of them, or back."""
    base, at, tier = setup.plan.name.partition("@")
    tiers = [tier for tier in TRIED_TIERS if setup.cluster.device.kind != "cpu" or tier.startswith("nvme")]
    if at and ":" not in tier:
        shares = [f"{tier}:{share}" for share in TRIED_SHARES]
        tiers = [*shares, *tiers[tiers.index(tier) + 1 :]] if tier in tiers else shares
    elif at:
        tiers = []
    for name in tiers:
        try:
            plan = Plan.named(f"{base}@{name}")
        except BadInput:  # one of the user's own, or states that stay where they are
            continue
        yield also(here, f"--offload {name}", strategy=plan)
    if at:
        try:
            yield also(here, f"--strategy {base}, without offload", strategy=Plan.named(base))
        except BadInput:
            return


def _together(here: Changed[Request], setup: Setup) -> Iterator[Iterator[Changed[Request]]]:
    """Smaller micro-batches that are recomputed, more of it or less, and the least of all with states elsewhere."""
    if not setup.model.computes:
        return
    for mode in ("full", "selective")[: 2 if setup.checkpointing == "none" else 1]:
        yield iter(()) if _recomputes_all(setup) else _smaller(also(here, checkpointing=mode), setup)
    if (least := _leanest(here, setup)).options:
        yield _without_logits(here, setup)
        yield _elsewhere(least, setup)
    yield _parted(here, setup)


def _without_logits(here: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    """All recomputed and a loss without all logits, and at last with the smallest micro-batches."""
    if _has_logits(here, setup):
        if not _recomputes_all(setup):
            yield also(here, checkpointing="full", loss="chunked")
        if setup.micro_batch > 1:
            yield also(_leanest(here, setup), loss="chunked")


def _parted(here: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    for axes in parted_axes(setup):
        if all(getattr(here.made, axis) is None for axis in axes):
            yield also(_leanest(here, setup), **axes)


def parted_axes(setup: Setup) -> Iterator[dict[str, Any]]:
    """Over how many GPUs that need no network each layer may be, and over how many each long sequence, of a setup that
    has none in parts; the fewest first. What no number of data ranks makes smaller is a whole layer, and a sequence.
    """
    count = setup.cluster.count
    layers = _doubled(min(setup.cluster.device.near_ranks, count) if setup.mesh.tp == 1 else 1)
    long = setup.mesh.cp == 1 and setup.sequence >= LONG_SEQUENCE
    sequences = _doubled(count if long else 1)
    for tp, cp in sorted(product(layers, sequences), key=lambda axes: (math.prod(axes), axes[1])):
        if 1 < tp * cp <= count:
            yield {axis: size for axis, size in (("tp", tp), ("cp", cp)) if size > 1}


def _doubled(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _larger(here: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    """More GPUs, as it is, with the least memory that it may take, and with layers in parts."""
    for base in (*_with_leanest(here, setup), *_parted(here, setup)):
        yield from on_more_gpus(base, setup)


def on_more_gpus(base: Changed[Request], setup: Setup) -> Iterator[Changed[Request]]:
    """A request on twice as many GPUs as a setup has, on four times as many, and so on, as far as is tried."""
    count = setup.cluster.count
    while (count := 2 * count) <= MOST_TRIED:
        yield also(base, gpus=count)
