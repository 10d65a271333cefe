"""One rank along pp in one step: the seconds of its stages, and of the communication around them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terrazzo.planner.caching import once_per_setup
from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.layout.placement import Placement, placed_units
from terrazzo.planner.layout.stages import blocks_of_chunks
from terrazzo.planner.machine.network import Network
from terrazzo.planner.machine.transfers import UnitTransfer, When
from terrazzo.planner.model.shapes import UnitShape
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.attention import attention_bytes, attention_flops, attention_rate, forward_share
from terrazzo.planner.timing.compute import (
    Seconds,
    block_seconds,
    head_seconds,
    launch_seconds,
)
from terrazzo.planner.timing.overlap import CONTENTION, BlockRow, Exposure, block_exposure, root_exposure
from terrazzo.planner.timing.rank_update import RankUpdate
from terrazzo.planner.timing.rates import copy_s, memory_rate
from terrazzo.planner.timing.timeline import PassSeconds
from terrazzo.planner.traffic.exchanges import model_parallel_moves, pipeline_moves
from terrazzo.planner.traffic.outer_moves import outer_moves
from terrazzo.planner.traffic.volumes import matrix_moves, repetitions, unit_copies, unit_moves

__all__ = ["FORMULAS", "PipelineRank"]

TENSOR_HIDDEN = 0.5
"""The share of tensor-parallel communication in backward that the weight gradients' products hide where it runs beside
them, under `tensor_overlap` `backward` (Megatron-LM's default). The engine waits for each of these exchanges."""

ASYNC_HIDDEN = 0.4
"""The share of tensor-parallel exchanges that torch's async TP hides: on 8 ranks of a host it is 10 % faster than
without with Llama 3 8B on 64 H100, and 9 % with 70B on 256, which spend 27 and 18 % of a step on these exchanges here
(pytorch/torchtitan/benchmarks/asyncTP_llama3_h100_2025-06): a third and a half of them."""

FORMULAS = {
    "time.tensor": Formula(
        f"micro_batches * layers * waits_s; seconds of a layer's collectives; hidden are {TENSOR_HIDDEN:g} of those of "
        f"tp in backward under tensor overlap backward, {ASYNC_HIDDEN:g} of all of tp under async, and of a ring what "
        "attention hides",
        "arXiv 2205.05198 section 4; pytorch/torchtitan benchmarks; ring attention, arXiv 2310.01889",
    ),
}


@dataclass(frozen=True)
class _Blocks:
    """Equal units in a row, and the seconds of one in one micro-batch.

    Attributes:
        waits: for collectives of the other axes.
    """

    unit: UnitShape
    count: int
    placement: Placement
    seconds: Seconds
    waits: PassSeconds

    @property
    def passes(self) -> PassSeconds:
        """Seconds of one unit's computation and waits."""
        return PassSeconds(self.seconds.forward + self.waits.forward, self.seconds.backward + self.waits.backward)


class _Costs(NamedTuple):
    """What `_Blocks` say of one."""

    seconds: Seconds
    waits: PassSeconds


@once_per_setup
def _costs(setup: Setup, unit: UnitShape, pace: float, free: bool) -> _Costs:
    """Seconds of a unit's computation, and exposed communication of tensor, context and expert parallelism.

    Attention hides what goes round a ring, and products what `tensor_overlap` says of exchanges along tp.

    Args:
        pace: see `PipelineRank`; free: whether collectives take no time.
    """
    seconds = block_seconds(setup, unit).at(pace) if unit.block else Seconds()
    network = Network(setup.cluster.device, free)
    waits, rounds = ({When.FORWARD: 0.0, When.BACKWARD: 0.0} for _ in range(2))
    for move in model_parallel_moves(setup, unit):
        spent = network.move_s(move)
        if move.purpose == "tensor":
            spent *= 1 - _hidden_along_tp(setup, move.when)
        (rounds if move.purpose == "context" and move.kind == "send" else waits)[move.when] += spent
    attention = seconds.attention * seconds.forward_share
    waits[When.FORWARD] += max(0.0, rounds[When.FORWARD] - attention)
    waits[When.BACKWARD] += max(0.0, rounds[When.BACKWARD] - (seconds.attention - attention))
    return _Costs(seconds, PassSeconds(*waits.values()))


def _hidden_along_tp(setup: Setup, when: When) -> float:
    """The share of an exchange along tp that products hide."""
    if setup.tensor_overlap == "async":
        return ASYNC_HIDDEN
    return TENSOR_HIDDEN if setup.tensor_overlap == "backward" and when is When.BACKWARD else 0.0


@once_per_setup
def _move_seconds(setup: Setup, unit: UnitShape, placement: Placement, free: bool) -> dict[When, float]:
    """Seconds of the collectives and copies of a unit's states at each moment but the update's."""
    network, seconds = Network(setup.cluster.device, free), dict[When, float]()
    for move in unit_moves(setup, unit, placement):
        seconds[move.when] = seconds.get(move.when, 0.0) + network.move_s(move)
    for move in unit_copies(unit, placement):
        if move.when is not When.UPDATE:
            copied_s = copy_s(setup.cluster, network.link(move.over), move.sent_bytes)
            seconds[move.when] = seconds.get(move.when, 0.0) + copied_s
    return seconds


class PipelineRank:
    """Rank `pp_rank` along pp, of any of the other axes. The device's rates and links must be known.

    Args:
        pace: by how much longer computation takes here than the device's figures say.
        waits: whether collectives take time; not, where what they take was measured as a whole.
    """

    def __init__(self, setup: Setup, pp_rank: int, pace: float = 1.0, waits: bool = True) -> None:
        self.setup, self._pace, self._pp_rank = setup, pace, pp_rank
        self._network = Network(setup.cluster.device, free=not waits)
        self._units = placed_units(setup, pp_rank)
        self._roots = [row for row in self._units if row.unit.is_root]
        self._head = head_seconds(setup).at(pace) if pp_rank == setup.mesh.pp - 1 else Seconds()
        rows = [row for row in self._units if row.unit.block or not row.unit.is_root]
        self._blocks = [_Blocks(*row, *_costs(setup, row.unit, pace, not waits)) for row in rows]
        self._update = RankUpdate(setup, pp_rank, pace, self._passes_of)

    def _passes_of(self, unit: UnitShape) -> PassSeconds:
        """Seconds of one of these units in one micro-batch."""
        return next((part.passes for part in self._blocks if part.unit is unit), PassSeconds(0.0, 0.0))

    @cached_property
    def busy_s(self) -> float:
        """Seconds of all micro-batches, without waiting for other stages, data-parallel communication, and update."""
        return self.setup.micro_batches * sum(each.both for each in self.passes)

    @cached_property
    def passes(self) -> list[PassSeconds]:
        """Forward and backward of one micro-batch through each of this rank's stages."""
        forwards, backwards = list[float](), list[float]()
        for part in self._blocks:
            each = part.passes
            forwards += [each.forward] * part.count
            backwards += [each.backward] * part.count
        stages, begin = list[PassSeconds](), 0
        for count in blocks_of_chunks(self.setup, self._pp_rank) if self.setup.staged else ():
            end = begin + count
            stages.append(PassSeconds(sum(forwards[begin:end]), sum(backwards[begin:end])))
            begin = end
        stages = self._with_head(stages or [PassSeconds(sum(forwards), sum(backwards))])
        stages = [_added(stage, self._before_sending) for stage in stages]
        around = 0 if self._pp_rank == 0 else -1  # the embeddings, or what is around the head
        stages[around] = _added(stages[around], self._root_waits)
        return stages

    def _with_head(self, stages: list[PassSeconds]) -> list[PassSeconds]:
        """The head is in the last stage. `stages` is one sum of all in Megatron-core, where they are equal; layers that
        they do not divide by are cut there so that the head takes a layer's place (arXiv 2407.21783, section 3.3.2).
        """
        head, chunks = PassSeconds(self._head.forward, self._head.backward), self.setup.virtual_stages
        if self.setup.staged:
            return [*stages[:-1], _added(stages[-1], head)]
        if takes_place := self.setup.model.layers % (self.setup.mesh.pp * chunks) > 0:
            stages = [_added(stages[0], head)]
        each = PassSeconds(stages[0].forward / chunks, stages[0].backward / chunks)
        return [each] * chunks if takes_place else [*[each] * (chunks - 1), _added(each, head)]

    @property
    def send_s(self) -> float:
        """Seconds until the next stage has what this rank made of a micro-batch."""
        moves = [move for move in self._messages if move.kind == "send"]
        return sum(map(self._network.move_s, moves)) / (sum(move.messages for move in moves) or 1)

    @cached_property
    def _messages(self) -> list[UnitTransfer]:
        """What it sends to other stages of each micro-batch, and what its ranks along tp put together for that."""
        return list(pipeline_moves(self.setup, self._pp_rank))

    @cached_property
    def _before_sending(self) -> PassSeconds:
        """What each stage waits for before its messages leave: ranks along tp put whole sequences together."""
        spent = {When.FORWARD: 0.0, When.BACKWARD: 0.0}
        for move in self._messages:
            if move.kind != "send":
                spent[move.when] += self._network.move_s(move) / self.setup.virtual_stages
        return PassSeconds(*spent.values())

    @cached_property
    def _root_waits(self) -> PassSeconds:
        """Of a root that has no block: what others wait for is theirs."""
        rest = (self._pace, self._network.free)
        waits = [_costs(self.setup, unit, *rest).waits for unit, _, _ in self._roots if unit.block is None]
        return PassSeconds(sum(each.forward for each in waits), sum(each.backward for each in waits))

    @cached_property
    def exposure(self) -> Exposure:
        """Data-parallel communication, and copies of weights and gradients from and to the host, of a step."""
        root, free = Exposure(0.0, 0.0), self._network.free
        for unit, _, placement in self._roots:
            root += root_exposure(_move_seconds(self.setup, unit, placement, free), repetitions(self.setup, unit))
        rows = []
        for part in self._blocks:
            moves = {} if part.unit.is_root else dict(_move_seconds(self.setup, part.unit, part.placement, free))
            if self.setup.staged:  # sums over ranks come when all has run
                alone = part.count * moves.pop(When.LAST, 0.0)
                root += Exposure(alone, alone)
            if part.unit.forward_only:  # what comes again, in stages, comes for the forward of other micro-batches
                alone = part.count * moves.pop(When.BACKWARD, 0.0) * repetitions(self.setup, part.unit)[When.BACKWARD]
                root += Exposure(alone, alone)
            rows.append(BlockRow(part.count, *part.passes, moves, has_backward=not part.unit.forward_only))
        exchanged = sum(map(self._network.move_s, matrix_moves(self.setup, self._pp_rank)))
        for move, per_step, beside in outer_moves(self.setup, self._pp_rank):  # what is hidden is of a slow link
            exchanged += per_step * max(0.0, self._network.move_s(move) - beside * self.busy_s)
        root += Exposure(exchanged, exchanged)
        beside = self.setup.cluster.device.kind != "cpu"
        repeats = repetitions(self.setup, self.setup.model.root)
        return root + block_exposure(rows, repeats, self.setup.prefetch, beside)

    @property
    def work_s(self) -> float:
        """Seconds in which the rank keeps a core busy in a step: it computes, hands on bytes or updates."""
        sent = sum(self._network.move_s(move) for move in self._messages if move.kind == "send")
        handed_on = self.exposure.total + self.setup.micro_batches * sent
        return self.busy_s + handed_on + self.update_s

    @property
    def summed_s(self) -> float:
        """Seconds of communication beside its turns in the pipeline: what nothing hides, or is in computation's way."""
        return self.exposure.exposed + CONTENTION * self.exposure.hidden

    @property
    def update_s(self) -> float:
        """Seconds of the optimizer's step."""
        return sum(term.value for term in self.update_terms)

    # -- terms -------------------------------------------------------------------------------------------------

    def pass_terms(self) -> list[Term]:
        """Of forwards and backwards: `busy_s`, and the communication that they do not hide."""
        return [*self._compute_terms(), *self._wait_terms()]

    def _compute_terms(self) -> list[Term]:
        pace, memory, counts = self._pace, self._sum("memory"), self._counts
        bandwidth = memory_rate(self.setup.cluster.device)
        flops, products = self._sum("matmul_flops"), self._sum("matmul") / pace
        matmul = {"flops": flops, "sustained_flops": flops / products if products else 0.0}  # the head's is another
        moved = {"bytes": memory / pace * bandwidth, "bandwidth": bandwidth}
        repeated, gaps = self._each("recompute") / pace, self._each("launch") / pace
        launch = {"gap_s": gaps, "launch_s": launch_seconds(self.setup)}
        return [
            Term.seconds("matrix products", self._sum("matmul"), "time.matmul", pace=pace, **matmul),
            Term.seconds("attention", self._sum("attention"), "time.attention", pace=pace, **self._attention()),
            Term.seconds("memory-bound operations", memory, "time.memory", pace=pace, **moved),
            Term.seconds(
                "recomputation", self._sum("recompute"), "time.recompute", pace=pace, repeated_s=repeated, **counts
            ),
            Term.seconds("kernel launches", self._sum("launch"), "time.launch", pace=pace, **launch, **counts),
        ]

    def _attention(self) -> dict[str, float]:
        flops = moved_bytes = multiplied_s = 0.0
        for part in self._blocks:
            if part.unit.block is not None:
                work, moved = (
                    attention_flops(self.setup, part.unit.block),
                    attention_bytes(self.setup, part.unit.block),
                )
                share = forward_share(self.setup) if part.unit.forward_only else 1
                times = self.setup.micro_batches * part.count * share
                flops, moved_bytes = flops + times * work, moved_bytes + times * moved
                multiplied_s += times * work / attention_rate(self.setup, part.unit.block)
        rate, bandwidth = flops / (multiplied_s or 1.0), memory_rate(self.setup.cluster.device)
        return {"flops": flops, "attention_flops": rate, "moved_bytes": moved_bytes, "bandwidth": bandwidth}

    def _wait_terms(self) -> list[Term]:
        exposure, waits, counts = self.exposure, self._blocking_s(), self._counts
        hidden, each = exposure.hidden, waits / self.setup.micro_batches / (counts["layers"] or 1)
        data = {"total_s": exposure.total, "hidden_s": hidden}
        return [
            Term.seconds("tensor, context and expert communication", waits, "time.tensor", waits_s=each, **counts),
            Term.seconds("data-parallel communication", exposure.exposed, "time.data", **data),
            Term.seconds("contention", CONTENTION * hidden, "time.contention", contention=CONTENTION, hidden_s=hidden),
        ]

    def _sum(self, part: str) -> float:
        """Seconds of one part of all blocks and the head, in a step."""
        blocks: float = sum(each.count * getattr(each.seconds, part) for each in self._blocks)
        head: float = getattr(self._head, part)
        return self.setup.micro_batches * (blocks + head)

    def _each(self, part: str) -> float:
        """Seconds of one part for one block and micro-batch, on average, with its share of the head."""
        counts = self._counts
        return self._sum(part) / counts["layers"] / counts["micro_batches"] if counts["layers"] else 0.0

    @property
    def _counts(self) -> dict[str, float]:
        return {"micro_batches": self.setup.micro_batches, "layers": sum(part.count for part in self._blocks)}

    def _blocking_s(self) -> float:
        waits = sum(part.count * part.waits.both for part in self._blocks)
        put_together = self.setup.virtual_stages * self._before_sending.both
        return self.setup.micro_batches * (waits + self._root_waits.both + put_together)

    @property
    def update_terms(self) -> list[Term]:
        """Of the optimizer's step."""
        return self._update.terms


def _added(one: PassSeconds, other: PassSeconds) -> PassSeconds:
    return PassSeconds(one.forward + other.forward, one.backward + other.backward)
