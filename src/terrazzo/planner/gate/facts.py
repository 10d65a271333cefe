"""What rules ask of a setup, and what their sentences name of it."""

from __future__ import annotations

from terrazzo.engine.partition.unit_sizes import most_in_one
from terrazzo.messages import counted
from terrazzo.parallel import Chunks
from terrazzo.parallel.sharing_rules import shares_experts
from terrazzo.planner.layout.stages import units_on
from terrazzo.planner.machine.devices import DRIVE_RATED_BYTES
from terrazzo.planner.machine.mesh import RankGroup, group_of
from terrazzo.planner.machine.network import Network
from terrazzo.planner.memory.tiers import host_writes
from terrazzo.planner.setup.checks import shares_all_heads
from terrazzo.planner.setup.kernels import why_unfused
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.timeline import idle_of_equal_stages
from terrazzo.planner.traffic.exchanges import expert_group, model_parallel_moves

__all__ = ["Facts", "in_shares", "most_of_model", "on_disk", "split_group", "tiers", "whole_model", "zero_stage"]


def zero_stage(setup: Setup) -> int:
    """The ZeRO stage whose states a plan splits: 0 to 3."""
    plan = setup.plan
    return 3 if plan.weight.axes else 2 if plan.grad.axes else 1 if plan.optim.axes else 0


def tiers(setup: Setup) -> dict[str, str]:
    """State → tier of what is not on the device, as the plan writes it: `cpu`, or `cpu:0.7` of a share of the units."""
    return {state: place.tier for state, place in setup.plan.places().items() if place.offloaded}


def on_disk(setup: Setup, *states: str) -> bool:
    """Whether any part of these states, by default of all, is on a disk."""
    return any("nvme" in tier for state, tier in tiers(setup).items() if not states or state in states)


def in_shares(setup: Setup) -> bool:
    """Whether a state is on one tier for some units and on another for others."""
    return any(len(place.shares) > 1 for place in setup.plan.places().values())


def whole_model(setup: Setup) -> bool:
    """Whether all weights are gathered at once."""
    one = setup.framework.whole_model_unit or (not setup.model.repeated and setup.model.vocab > 0)
    return one and _gathers(setup)


def most_of_model(setup: Setup) -> bool:
    """Whether most weights are gathered at once, or all."""
    units = [[tensor.numel for tensor in unit.tensors] for unit in setup.model.units for _ in range(unit.count)]
    return whole_model(setup) or (_gathers(setup) and not setup.model.bare and most_in_one(units) is not None)


def _gathers(setup: Setup) -> bool:
    return zero_stage(setup) == 3 and setup.mesh.data_ranks > 1


def split_group(setup: Setup) -> RankGroup | None:
    """The innermost groups that would fit on a host, or in a domain, and of which some lie across two."""
    of = setup.cluster.device.near_ranks
    inner = (group_of(setup.mesh, "tp"), group_of(setup.mesh, "cp"), expert_group(setup))
    outer = (group_of(setup.mesh, axis) for axis in ("dp_shard", "dp_replicate"))
    split = (group for group in (*inner, *outer) if group.span <= of and group.on_hosts(of).hosts > 1)
    return next(split, None)


class Facts:
    """A setup as sentences name it: numbers, and names or amounts as text. What takes computing is computed if asked.

    Attributes:
        vocab, layers, positions: the model's; `padded_vocab` is what ranks along tp can share evenly.
        tp, pp, cp, ep: ranks along these axes; `stages`: of the pipeline, in which a rank may have several.
        shard_ranks: of a shard group; `neighbours` with those along tp between them.
        unfused: why attention keeps its scores by itself, or None.
        gpus: of the run; host: what ranks are on that reach each other without a network, a `host`, or a `rack` where a
            scale-up domain is larger; host_ranks: of a full one; last_host: of the last.
        rows: sequences of a step with `empty_rows`, which are `empty_share` of it; `at_once` says how many go together.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        mesh, model, device = setup.mesh, setup.model, setup.cluster.device
        self.plan, self.model, self.device, self.optimizer = (
            setup.plan.name,
            model.name,
            device.name,
            setup.optimizer.name,
        )
        self.vocab, self.layers, self.positions = model.vocab, model.layers, model.positions
        self.attention, self.unfused = setup.attention, why_unfused(model, device)
        self.sequence, self.micro_batches = setup.sequence, setup.micro_batches
        self.tp, self.pp, self.cp, self.ep = mesh.tp, mesh.pp, mesh.cp, mesh.ep
        self.global_batch, self.empty_rows, self.rows = setup.global_batch, setup.empty_rows, setup.rows
        self.stages = mesh.pp * setup.virtual_stages
        self.padded_vocab = -(-model.vocab // mesh.tp) * mesh.tp
        self.shard_ranks, self.neighbours = mesh.shard_ranks, mesh.shard_ranks * mesh.tp
        self.gpus, self.host_ranks = setup.cluster.count, device.near_ranks
        self.host = "host" if self.host_ranks == device.per_node else "rack"
        self.last_host = self.gpus % self.host_ranks or self.host_ranks

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return zero_stage(self._setup)

    @property
    def empty_share(self) -> str:
        """In per cent."""
        return f"{self.empty_rows / self.rows:.0%}"

    @property
    def at_once(self) -> str:
        """The sequences that go through the model together, as a product."""
        size, ranks = self._setup.micro_batch, self._setup.mesh.batch_ranks
        return f"micro-batch {size} × {counted(ranks, 'data rank')} = {size * ranks}"

    @property
    def full_batches(self) -> str:
        """The nearest global batches that have no empty rows."""
        below = self.rows - self._setup.micro_batch * self._setup.mesh.batch_ranks
        return " or ".join(str(size) for size in (below, self.rows) if size)

    @property
    def bubble(self) -> str:
        """What equal stages wait, over what they compute, in per cent."""
        return f"{idle_of_equal_stages(self._setup):.0%}"

    @property
    def offloaded(self) -> str:
        """Each state that is not on the device, and where it is."""
        return ", ".join(f"{state} on {tier}" for state, tier in tiers(self._setup).items())

    @property
    def grad_tier(self) -> str:
        """Where gradients are."""
        return self._setup.plan.grad.tier

    @property
    def units(self) -> int:
        """Sharding units of the first rank along pp."""
        return sum(count for _, count in units_on(self._setup, 0))

    @property
    def written_per_step(self) -> str:
        """Bytes that a step writes to the disks of a host."""
        written = host_writes(self._setup)
        return f"{written / 1e12:.3g} TB" if written >= 1e10 else f"{written / 1e9:.3g} GB"

    @property
    def steps_of_a_drive(self) -> str:
        """How many steps a consumer's drive lasts."""
        return f"{DRIVE_RATED_BYTES / max(host_writes(self._setup), 1):,.0f}"

    @property
    def full_hosts(self) -> str:
        """Numbers of GPUs that fill hosts or racks: more or fewer of these, or of each host as many as divide all."""
        whole = self.gpus - self.gpus % self.host_ranks
        counts = " or ".join(str(count) for count in (whole, whole + self.host_ranks) if count)
        dividing = [size for size in range(2, self.host_ranks) if self.gpus % size == 0]
        of_each = f", or {dividing[-1]} GPUs of each host (--per-node)" if dividing and self.host == "host" else ""
        return f"Use {counts} GPUs (--gpus){of_each}."

    @property
    def split(self) -> RankGroup:
        """The groups of `split_group`."""
        split = split_group(self._setup)
        assert split is not None, "asked for only where there is one"
        return split

    @property
    def unsplit(self) -> str:
        """What has these groups fill hosts or racks: another size, if there is one, or fewer GPUs of each host."""
        group, mesh, of = self.split, self._setup.mesh, self.host_ranks
        beside = mesh.data_ranks * mesh.tp // group.stride // (mesh.cp if group.axis == "tp" else 1)
        whole = [size for size in range(2, of + 1) if of % (size * group.stride) == 0 and beside % size == 0]
        ways = []
        if whole := [size for size in whole if self._may_be(group.axis, size)]:
            best = min(whole, key=lambda size: abs(size - group.size))
            replicas = f"dp_replicate {mesh.data_ranks // best}, for groups of {best}"
            ways.append(replicas if group.axis == "dp_shard" else f"{group.axis} {best}")
        if self.host == "host":
            ways.append(f"{of // group.span * group.span} GPUs of each host (--per-node)")
        return (
            f"Use {', or '.join(ways) or f'sizes whose product along {group.axis} and the axes inside divides {of}'}."
        )

    def _may_be(self, axis: str, size: int) -> bool:
        """Whether an axis may have so many ranks, for all that is known of the model."""
        setup = self._setup
        if axis == "tp":
            return shares_all_heads(setup.model, size)
        if axis == "cp":
            return setup.sequence % Chunks(size, setup.balance).count == 0
        if axis == "ep":
            return shares_experts(setup.model.experts, size)
        return axis == "dp_shard" and size % setup.mesh.cp == 0  # dp_replicate has what the others leave

    @property
    def exchange_time(self) -> str:
        """How long a step waits for tensor parallelism, where the links are known."""
        setup = self._setup
        network, group = Network(setup.cluster.device), group_of(setup.mesh, "tp")
        if setup.mesh.tp == 1 or network.bandwidth(group) is None:
            return "for an unknown time"
        moves = [(move, count) for unit, count in units_on(setup, 0) for move in model_parallel_moves(setup, unit)]
        once = sum(count * network.move_s(move) for move, count in moves if move.purpose == "tensor")
        return f"about {once * setup.micro_batches:.2g} s"
