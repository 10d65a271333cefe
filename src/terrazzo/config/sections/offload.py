"""The section `offload`: states that are not on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from terrazzo.config.section import Section
from terrazzo.messages import did_you_mean
from terrazzo.words import TIERS, tier_shares

__all__ = ["OffloadConfig", "tier_text"]


def tier_text(value: str | Mapping[Any, Any]) -> str:
    """`cpu`, or a mapping such as `{cpu: 0.7}`, as the text that `Place` reads.

    Raises:
        ValueError: for no tier.
    """
    shares = value if isinstance(value, Mapping) else dict(part.partition(":")[::2] for part in value.split(","))
    for tier in shares:
        if str(tier).strip() not in TIERS:
            raise ValueError(f"{tier!r} is no tier.{did_you_mean(str(tier), TIERS)} Tiers: {', '.join(TIERS)}")
    return ",".join(f"{tier}:{share}" for tier, share in value.items()) if isinstance(value, Mapping) else value


class OffloadConfig(Section):
    """The tiers of states that are not on the device, in place of the plan's, and how they come and go."""

    weight: str | None = Field(
        None, description="weights at rest: device, cpu, nvme, or shares of the units; null: as the plan says"
    )
    grad: str | None = Field(None, description="finished gradients, likewise; null: as the plan says")
    optim: str | None = Field(
        None, description="optimizer state, likewise, master weights included; null: as the plan says"
    )
    activations: Literal["device", "cpu"] = Field(
        "device", description="inputs that activation checkpointing keeps: `device`, or `cpu` for host memory"
    )
    path: str | list[str] | None = Field(
        None,
        description="nvme: folder for swap files; several are striped. Those in log.folder are made, others must exist"
        "; null: none, where nothing is on nvme",
    )
    step: Literal["auto", "overlapped", "synchronous", "backward"] = Field(
        "auto",
        description="when units are updated: `overlapped` behind the next forward, `backward` behind the rest of "
        "backward, `synchronous` on the spot; `auto`: backward where nothing is clipped or scaled, else overlapped",
    )
    threads: int | None = Field(None, gt=0, description="of the update on the CPU, per rank; null: its share of cores")
    pin: bool = Field(True, description="CUDA: page-lock the host memory of states and activations")
    direct: bool = Field(True, description="nvme: go past the page cache (O_DIRECT) where the file system can")
    block_mib: float = Field(4.0, gt=0, le=1024, description="nvme: size of one read or write")
    depth: int = Field(8, gt=0, description="nvme: reads and writes in flight per rank")
    digest: bool = Field(False, description="nvme: check what is read against a CRC-32 of what was written")

    @field_validator("weight", "grad", "optim", mode="before")
    @classmethod
    def _as_tiers(cls, value: Any) -> Any:
        if not isinstance(value, str | dict):
            return value
        text = tier_text(value)
        return "device" if set(tier_shares(text)) == {"device"} else text
