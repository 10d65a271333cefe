"""The numbers of a log step, of what the loop and the engine have measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.config import Config
from terrazzo.engine import engine_of
from terrazzo.engine.runtime import device as devices
from terrazzo.planner.machine.devices import this_machine
from terrazzo.telemetry import StepMetrics
from terrazzo.train.model.expert_load import ExpertLoad, counters_of
from terrazzo.train.planning.as_setup import executed_share, matmul_format
from terrazzo.train.planning.summary import utilised
from terrazzo.train.session.session import Session

__all__ = ["StepMetricsBuilder", "StepsMeasured"]


@dataclass(frozen=True)
class StepsMeasured:
    """What the loop measured since the previous log step, on this rank; losses and load are of `step`."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    steps: int
    tokens: int
    total_s: float
    data_wait_s: float
    communication_s: float
    peak_memory_bytes: int
    load: Mapping[str, ExpertLoad]


def peak_flops(config: Config) -> float | None:
    """Per second, of this machine's device in the format that the run computes in; None where it is not known."""
    return this_machine().device.peak_flops.get(matmul_format(config))


class StepMetricsBuilder:
    """Makes the metrics of a session's log steps.

    Attributes:
        peak_flops: of the device, per second; None on a CPU, or where it is not known.
        known: the optional metrics that this run has: of what a device does not tell, or a plan does not do, none.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._engine = session, engine_of(session.model)
        self._on_cuda = devices.is_cuda(session.ranks.device)
        self._executed = executed_share(session.config, session.ranks.world_size, session.flops_per_token)
        self.peak_flops = peak_flops(session.config) if self._on_cuda else None
        self.known = self._known()
        self._usage = self._engine.store.usage()  # of memory and files beside the device, at the last log step

    def _known(self) -> set[str]:
        session = self._session
        tiers = {tier for unit in self._engine.units for tier in unit.buckets[0].tiers}
        has = {
            "mfu": self.peak_flops is not None,
            "tflops": self._on_cuda and self.peak_flops is None,
            "communication": not self._on_cuda and session.ranks.world_size > 1,
            "expert_imbalance": session.config.model.experts.count is not None or any(counters_of(session.model)),
            "skipped_steps": bool(session.optimizer.scaler_state()),
            "disk_read_gb_s": "nvme" in tiers,
            "disk_write_gb_s": "nvme" in tiers,
            "cpu_step_gparam_s": bool(tiers - {"device"}),
        }
        return {name for name, is_there in has.items() if is_there}

    def metrics(self, measured: StepsMeasured) -> StepMetrics:
        """Those of the log step that has just ended."""
        session = self._session
        flops = session.flops_per_s(measured.steps, measured.total_s)
        fp16 = bool(session.optimizer.scaler_state())
        return StepMetrics(
            step=measured.step,
            loss=measured.loss,
            learning_rate=measured.learning_rate,
            tokens=session.progress.tokens,
            step_s=measured.total_s / measured.steps,
            tokens_per_s=measured.tokens / measured.total_s,
            data_wait=measured.data_wait_s / measured.total_s,
            # NCCL's wait() only orders streams: the process never stands still there.
            communication=None if self._on_cuda else measured.communication_s / measured.total_s,
            peak_memory_bytes=measured.peak_memory_bytes,
            grad_norm=measured.grad_norm,
            tflops=flops / 1e12 if flops else None,
            **utilised(flops, self._executed, self.peak_flops),
            loss_scale=session.optimizer.loss_scale if fp16 else None,
            skipped_steps=session.optimizer.skipped_steps if fp16 else None,
            **_expert_load(measured.load),
            **self._offload_rates(),
        )

    def _offload_rates(self) -> dict[str, float | None]:
        """Of drives and of updates on the CPU since the last log step; None where there were none."""
        before, self._usage = self._usage, self._engine.store.usage()

        def rate(amount: str, seconds: str) -> float | None:
            spent = self._usage[seconds] - before[seconds]
            return (self._usage[amount] - before[amount]) / spent / 1e9 if spent else None

        return {
            "disk_read_gb_s": rate("read_bytes", "read_s"),
            "disk_write_gb_s": rate("written_bytes", "write_s"),
            "cpu_step_gparam_s": rate("stepped_numel", "step_s"),
        }


def _expert_load(load: Mapping[str, ExpertLoad]) -> dict[str, float]:
    """Of all routers the worst imbalance and the mean entropy, of those that tell; nothing without experts."""
    if not load:
        return {}
    entropies = [each.entropy for each in load.values() if each.entropy is not None]
    entropy = {"router_entropy": sum(entropies) / len(entropies)} if entropies else {}
    return {"expert_imbalance": max(each.imbalance for each in load.values()), **entropy}
