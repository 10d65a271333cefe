"""What the planner promises for a run: its estimate, with memory traced from the model's own operators if possible."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from terrazzo.config import Config
from terrazzo.engine import Traffic, find_units
from terrazzo.parallel import VocabularyLoss, leave_vocabulary, share_sequences
from terrazzo.parallel.simulated_ranks import SimulatedContext, cut_simulated
from terrazzo.planner import Cluster, Estimate, MemoryFigures, Setup, estimate
from terrazzo.planner.figures import Term
from terrazzo.planner.memory.matrices import matrix_updates
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.memory.replay import memory_of_trace, planned_units, updated_apart_numel, updated_numels
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.memory.trace import ActivationTrace, traced_activations, traced_update
from terrazzo.planner.timing.calibration import find_calibration, measured_memory
from terrazzo.planner.traffic.volumes import expected_exchanges
from terrazzo.train.data import Batch
from terrazzo.train.model.decoder import Decoder
from terrazzo.train.model.huggingface import one_sequence_per_row
from terrazzo.train.model.objectives import objective_of
from terrazzo.train.model.parallel import plan_of, vocabulary_apart
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.settings.optimizer import construct

__all__ = ["estimate_run", "exchanges_of", "traced_memory"]

PLACES = "cp all_gather"
"""What ranks along cp send of where documents begin, under `ulysses` alone, which gathers nothing else."""

TRACED_LAYERS = 3
"""Layers of a deep decoder that are traced: the first, one for all in the middle, and the last."""


def estimate_run(config: Config, ranks: int, cluster: Cluster | None = None, *, one_of_many: bool = False) -> Estimate:
    """What the planner promises for a run with `ranks` ranks.

    On CPUs memory comes from a trace of the model's own operators, elsewhere from formulas. Earlier measurements on
    this kind of device are taken into account.

    Args:
        cluster: as for `setup_of`.
        one_of_many: it is only asked whether it fits: nothing is traced, for seconds, where its states alone do not.

    Raises:
        BadInput: as for `setup_of`, or the setup is impossible.
    """
    setup = setup_of(config, ranks, cluster)
    record, note = find_calibration(setup)
    estimated = estimate(setup, record)
    notes = (*estimated.notes, *([note] if note else []))
    traces = setup.cluster.device.kind == "cpu" and not (one_of_many and _states_alone_overrun(setup))
    memory = traced_memory(config, setup) if traces else None
    memory = memory or memory_of(setup)
    return replace(estimated, memory=measured_memory(memory, record, setup) if record else memory, notes=notes)


def _states_alone_overrun(setup: Setup) -> bool:
    """Whether what is there all the time is more than the device has."""
    terms = [*state_terms(setup, tier="device"), *state_terms(setup, tier="cpu")]  # only CPUs are traced: one memory
    kept = sum(term.value for term in terms if term.name != "gradients")
    capacity = setup.cluster.device.memory_bytes
    return capacity is not None and kept > capacity


def traced_memory(config: Config, setup: Setup) -> MemoryFigures | None:
    """The memory of a run, traced from the model's own operators.

    None if these are compiled, or depend on values, which a trace does not have; if the units are not those of `setup`;
    and for pipelines, whose stages keep several micro-batches.
    """
    if config.train.compile or setup.mesh.pp > 1:
        return None
    if (trace := _trace_of_pass(_TracedPass.of(config, setup))) is None:
        return None
    memory, apart_bytes = memory_of_trace(setup, trace, _update_bytes(config, setup)), _apart_bytes(config, setup)
    update = (Term("update", apart_bytes, apart_bytes, "memory.traced"),) if apart_bytes else ()
    return replace(memory, host=(*memory.host, *update))


@dataclass(frozen=True)
class _TracedPass:
    """What a forward and backward pass of a run is made of; equal where the trace of one is that of the other.

    Attributes:
        settings: what the model and its batches follow from.
    """

    settings: tuple[object, ...]
    config: Config = field(compare=False)
    setup: Setup = field(compare=False)

    @classmethod
    def of(cls, config: Config, setup: Setup) -> _TracedPass:
        """Of a run: where states are, in which dtypes and over how many ranks is nothing to a pass."""
        apart = {"precision", "plan", "offload", "launch", "checkpoint", "log"}
        shared = setup.mesh.tp, setup.mesh.cp, setup.sequence_parallel
        sizes = setup.micro_batch, setup.sequence, setup.every, setup.model.vocab, setup.model.layers
        linears = config.precision.linears, str(config.precision.skip), setup.precision.compute
        settings = config.model_dump_json(exclude=apart), str(config.plan.units), *shared, *sizes, *linears
        return cls(settings, config, setup)


@functools.lru_cache(maxsize=16)
def _trace_of_pass(of: _TracedPass) -> ActivationTrace | None:
    """Trace a pass, or the trace of an equal one: changes are tried on a run that does not fit, most of which leave it
    as it is, and a deep model is traced for seconds.
    """
    config, setup, layers = of.config, of.setup, of.setup.model.layers
    alike = config.model.kind == "decoder" and config.model.attention.full_every is None
    shortened = alike and setup.every == 1 and layers > TRACED_LAYERS
    model = prepare_model(_traced(config, setup, shortened))
    names, _ = find_units(model, None)
    if (traced := _trace_of(model, config, setup, names)) is None:
        return None
    planned = sum(unit.count for unit in setup.model.repeated)
    if find_units(model, config.plan.units)[0] != names or (not shortened and len(names) != planned):
        return None
    if not shortened:
        return traced[0]
    copies = [f"{names[1]}.{index}" for index in range(layers - TRACED_LAYERS + 1)]
    return traced[0].stretched(names[1], copies)


def exchanges_of(config: Config, setup: Setup, rank: int) -> dict[str, int] | None:
    """Bytes of activations that a rank sends in a step along tp, cp and pp, by the names of `Traffic.by_name`.

    By formulas, unless some weights are frozen: then gradients of activations end where nothing before them is trained,
    and the model's own operators are traced, but for stages, which each have trained weights. None if that is not
    possible, and for pipelines with frozen weights whose ranks also share matrices or sequences.
    """
    mesh = setup.mesh
    if mesh.tp * mesh.cp == 1 or setup.model.trainable_numel == setup.model.numel:
        return expected_exchanges(setup, rank * mesh.pp // mesh.world_size)
    if mesh.pp > 1:
        return None
    model = prepare_model(_traced(config, setup, shortened=False))
    traced = _trace_of(model, config, setup, find_units(model, None)[0])
    if traced is None:
        return None
    sent = {name: count * setup.micro_batches for name, count in traced[1].items()}
    if mesh.cp > 1 and setup.context == "ulysses":  # a trace has nothing of where documents begin
        sent[PLACES] = expected_exchanges(setup, 0)[PLACES]
    return sent


def _trace_of(
    model: nn.Module, config: Config, setup: Setup, names: list[str]
) -> tuple[ActivationTrace, dict[str, int]] | None:
    """Trace one micro-batch on meta; also returns the bytes sent by axis and kind. None if operators need values."""
    try:
        traffic = _share_simulated(model, config, setup)
        with nullcontext() if config.cuts_attention else one_sequence_per_row():
            trace = traced_activations(model, names, setup.precision.compute, _training_pass(config, setup))
    except Exception:  # anything: a stranger's forward has been given tensors without values
        return None
    named = ((f"{axis} {kind}", sent) for axis, each in traffic.items() for kind, sent in each.by_name().items())
    return trace, {name: sent for name, sent in named if sent}


def _share_simulated(model: nn.Module, config: Config, setup: Setup) -> dict[str, Traffic]:
    """Make a model compute as one of the ranks that share its sequences and matrices; returns its traffic by axis."""
    traffic = {}
    if setup.mesh.cp > 1:
        settings = config.parallel.context
        context = SimulatedContext(setup.mesh.cp, settings.mode, settings.balance, config.cuts_attention)
        share_sequences(model, context)
        traffic["cp"] = context.traffic
    elif isinstance(model, Decoder) and model.context is not None:
        model.use_context(SimulatedContext(1, "gather", "none", config.cuts_attention))
    if setup.mesh.tp > 1:
        plan = plan_of(model, config)
        vocabulary = vocabulary_apart(model, plan)
        ranks = cut_simulated(model, setup.mesh.tp, setup.sequence_parallel, plan)
        if vocabulary:
            leave_vocabulary(model, VocabularyLoss(ranks, vocabulary))
        traffic["tp"] = ranks.traffic
    return traffic


def _traced(config: Config, setup: Setup, shortened: bool) -> Config:
    """The configuration to trace. On a CPU offloaded activations are where they would be anyway."""
    layers = {"layers": TRACED_LAYERS} if shortened else {}
    model = config.model.model_copy(update={"vocab_size": setup.model.vocab, **layers})
    offload = config.offload.model_copy(update={"activations": "device"})
    return config.model_copy(update={"model": model, "offload": offload})


def _training_pass(config: Config, setup: Setup) -> Callable[[nn.Module], torch.Tensor]:
    """A function for the forward and loss of one micro-batch, with this rank's part of each sequence."""
    size = (setup.micro_batch, setup.sequence // setup.mesh.cp)
    reference = torch.zeros(config.batch.micro_batch, 2)

    def run(model: nn.Module) -> torch.Tensor:
        tokens = torch.zeros(size, dtype=torch.int64)
        whole = torch.zeros(setup.micro_batch, setup.sequence, dtype=torch.int64)
        positions = whole if config.cuts_attention or setup.mesh.cp > 1 else None
        prefixes = whole if config.model.attention.prefix else None
        of_documents = (reference, positions, prefixes)
        batch = Batch(tokens, torch.zeros_like(tokens), tokens.numel(), config.batch.micro_batch, *of_documents)
        objective = objective_of(config)
        return objective.loss_of(model, model(**objective.inputs(model, batch, torch.device("cpu"))), batch)

    return run


def _update_bytes(config: Config, setup: Setup) -> int:
    """Bytes that the optimizer needs on the device during its step."""
    numels, matrices = updated_numels(planned_units(setup)), matrix_updates(setup, 0).held_bytes
    one_by_one = setup.precision.moments != setup.precision.master  # moments are brought to the master's dtype and back
    return max(matrices, _stepping_bytes(config, setup, [max(numels)] if numels and one_by_one else numels))


def _apart_bytes(config: Config, setup: Setup) -> int:
    """Bytes that the optimizer needs on the host while it steps there, one tensor at a time."""
    numel = updated_apart_numel(planned_units(setup), setup.offload.cell_numel)
    return _stepping_bytes(config, setup, [numel] if numel else [])


def _stepping_bytes(config: Config, setup: Setup, numels: list[int]) -> int:
    """Bytes needed to step these tensors at once, with gradients cast to the masters' dtype; see `traced_update`."""
    if not numels:
        return 0
    precision = setup.precision
    takes_sums = precision.accumulate == precision.master or precision.keeps_remainder
    cast = 0 if takes_sums else precision.master.itemsize
    if precision.narrow is not None:
        return sum(numels) * cast + precision.narrow.blocks.scratch_bytes(max(numels), setup.cluster.device.kind)
    if isinstance(precision.moments, torch.dtype) and precision.moments != precision.master:
        cast += setup.optimizer.moments * max(0, precision.master.itemsize - precision.moments.itemsize)
    make = functools.partial(construct, config.optimizer)
    return sum(numels) * cast + traced_update(make, numels, precision.master)
