"""The section `plan`: the row of the table, and how the ranks are arranged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from terrazzo.config.section import KeyDisagreement, Named, Section

__all__ = ["MeshConfig", "PlanConfig"]


class MeshConfig(Section):
    """How the ranks are arranged: `pp` times `dp_replicate` groups of `dp_shard` times `cp` times `tp` ranks each.

    `ep` is cut out of these groups, and takes no ranks of its own.
    """

    pp: int = Field(1, gt=0, description="parts of the ranks that have other layers each (pipeline parallelism)")
    dp_replicate: int | None = Field(
        1,
        gt=0,
        description="groups of ranks; each group holds all states of a hybrid plan; null: the number of ranks "
        "divided by the others, of which dp_shard is given then",
    )
    dp_shard: int | None = Field(
        None, gt=0, description="ranks of a group that split states; null: the number of ranks divided by the others"
    )
    cp: int = Field(1, gt=0, description="ranks that share each sequence (context parallelism)")
    tp: int = Field(1, gt=0, description="neighbouring ranks that share each matrix (tensor parallelism)")
    ep: int = Field(1, gt=0, description="neighbouring ranks, of the axes above, that have other experts each")

    @property
    def ranks_per_batch(self) -> int:
        """Number of neighbouring ranks that read the same sequences: cp times tp."""
        return self.cp * self.tp

    @property
    def fixed(self) -> int:
        """Product of the degrees of all axes but the one that follows the number of ranks, a multiple of it.

        That is `dp_shard`, or `dp_replicate` where this is null.
        """
        return self.pp * (self.dp_replicate or self.dp_shard or 1) * self.ranks_per_batch

    def groups(self, world_size: int) -> int:
        """Number of groups along `dp_replicate`, over `world_size` ranks."""
        return self.dp_replicate or world_size // self.fixed

    def readers(self, world_size: int) -> int:
        """Number of parts that the sequences of a batch are dealt out in, over `world_size` ranks."""
        return world_size // (self.ranks_per_batch * self.pp)

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if self.dp_replicate is None and self.dp_shard is None:
            yield KeyDisagreement(
                "dp_replicate",
                "and dp_shard are both null, and one of them is what the others leave of the ranks: set"
                " plan.mesh.dp_shard to the ranks of one group, such as 1, or plan.mesh.dp_replicate to how many groups"
                " there are",
            )


class OuterConfig(Section):
    """The outer step of replicas that train by themselves, DiLoCo's by default: see `plan.sync_every`."""

    lr: float = Field(0.7, gt=0, allow_inf_nan=False, description="its learning rate; 1 for local SGD")
    momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov's; 0 for local SGD")
    traffic: Literal["fp32", "int8"] = Field(
        "fp32", description="what weights' differences are sent as; `int8`: blocks of 256 codes with a scale"
    )
    fragments: int = Field(
        1, gt=0, description="sets of neighbouring units that take it by turns, each every plan.sync_every steps"
    )
    delay: int = Field(0, ge=0, description="steps that are trained while differences are on their way; 0: they wait")
    mixing: float = Field(
        0.5, ge=0, lt=1, description="share of their own weights that groups keep at an outer step with a delay"
    )
    meet_every: int | None = Field(
        None,
        gt=0,
        description="steps of a round where there are fragments or a delay, a multiple of plan.sync_every: then all "
        "fragments take an outer step and groups have equal weights; null: without them, each outer step ends a round",
    )


class PlanConfig(Named):
    """The row of the table: a preset by name, or four custom places such as "-", "D" or "S,R"."""

    name: str | None = Field(
        None,
        description="preset, such as zero0, zero1, zero2, zero3, hybrid_shard; zero3@cpu with offload; null: zero3, or "
        "the four places",
    )
    weight: str | None = Field(None, description="compute weights, at rest; null: as the preset")
    between: str | None = Field(
        None, description="compute weights, from the end of forward to backward; null: as the preset"
    )
    grad: str | None = Field(None, description="gradients, once reduced; null: as the preset")
    optim: str | None = Field(None, description="master weights and optimizer state; null: as the preset")
    mesh: MeshConfig = MeshConfig()
    units: list[str] | None = Field(
        None, description="class names, or name globs, a `*` for one level; null: found by themselves"
    )
    prefetch: int = Field(1, ge=0, description="units gathered ahead of the one that runs")
    sync_every: int | None = Field(
        None,
        gt=0,
        description="optimizer steps that the groups of plan.mesh.dp_replicate take by themselves before an outer step "
        "joins their weights (DiLoCo, local SGD); null: gradients are summed over the groups in every step",
    )
    outer: OuterConfig = OuterConfig()

    @property
    def round_steps(self) -> int | None:
        """Steps from one time that groups which train by themselves have equal weights to the next; None without."""
        return None if self.sync_every is None else self.outer.meet_every or self.sync_every

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, value: Any) -> Any:
        """`zero3` where neither a name nor a place is given."""
        keys = ("name", "weight", "between", "grad", "optim")
        open_ = isinstance(value, Mapping) and all(value.get(key) is None for key in keys)
        return {**value, "name": "zero3"} if open_ else value

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        rows = {"weight": self.weight, "between": self.between, "grad": self.grad, "optim": self.optim}
        places = [key for key, value in rows.items() if value is not None]
        if places and self.name is not None:
            yield KeyDisagreement("name", f"'{self.name}' and custom places ({', '.join(places)}): give one of them")
        elif places and len(places) < len(rows):
            missing = ", ".join(key for key in rows if key not in places)
            yield KeyDisagreement(
                places[0], f"without {missing}: a custom plan names all four places ('-' means not split)"
            )
