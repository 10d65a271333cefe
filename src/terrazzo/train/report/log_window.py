"""The rows of the log: measures the steps between two rows, and computes the numbers of a row."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from terrazzo.config import Config
from terrazzo.engine import engine_of
from terrazzo.engine.runtime import device as devices
from terrazzo.planner.machine.devices import this_machine
from terrazzo.telemetry import PeakMemory, StepMetrics, Stopwatch
from terrazzo.train.model.expert_load import ExpertLoad, counters_of
from terrazzo.train.planning.as_setup import executed_share, matmul_format
from terrazzo.train.report.summary import Pace, utilisation
from terrazzo.train.session.session import Session

__all__ = ["LogWindow"]


def peak_flops(config: Config) -> float | None:
    """Peak FLOP/s of this machine's device in the format that the run computes in; None if not known."""
    return this_machine().device.peak_flops.get(matmul_format(config))


class LogWindow:
    """Measures this rank's steps since the last row of the log, or since `begin`.

    Attributes:
        first_step: the step that the window begins after.
        peak_flops: of the device, per second; None on a CPU, or if not known.
        known: the optional metrics that this run has, given its device and plan.
        load: of the experts in the newest step, by router.
        pace: of all rows so far.
        peak_bytes: the highest memory use, at the newest row.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._engine = session, engine_of(session.model)
        self._on_cuda = devices.is_cuda(session.ranks.device)
        self._executed = executed_share(session.config, session.ranks.world_size, session.flops_per_token)
        self.peak_flops = peak_flops(session.config) if self._on_cuda else None
        self.known = self._optional_metrics()
        self._usage = self._engine.store.usage()  # of memory and files beside the device, at the last row
        self._watch, self._memory = Stopwatch(), PeakMemory(session.ranks.device)
        self._learning_rate = 0.0
        self.load: Mapping[str, ExpertLoad] = {}
        self.pace, self.peak_bytes = Pace(), 0
        self.begin()

    @property
    def is_first(self) -> bool:
        """Whether there has been no row since this start of the run."""
        return not self.pace.steps

    def _optional_metrics(self) -> set[str]:
        session = self._session
        tiers = {tier for unit in self._engine.units for tier in unit.buckets[0].spec.tiers}
        has = {
            "mfu": self.peak_flops is not None,
            "tflops": self._on_cuda,
            "communication": not self._on_cuda and session.ranks.world_size > 1,
            "expert_imbalance": session.config.model.experts.count is not None or any(counters_of(session.model)),
            "skipped_steps": bool(session.optimizer.scaler_state()),
            "disk_read_gb_s": "nvme" in tiers,
            "disk_write_gb_s": "nvme" in tiers,
            "cpu_step_gparam_s": bool(tiers - {"device"}),
        }
        return {name for name, is_there in has.items() if is_there}

    def begin(self) -> None:
        """Begin a new window."""
        self.first_step, self._tokens, self._wait_s = self._session.step, self._session.progress.tokens, 0.0
        self._watch.reset()

    def reading(self) -> AbstractContextManager[None]:
        """A context for waiting for data."""
        return self._watch.measure()

    def apart(self) -> AbstractContextManager[None]:
        """A context for what does not count as part of a step."""
        return self._watch.pause()

    def step_taken(self, learning_rate: float, load: Mapping[str, ExpertLoad]) -> None:
        """A step was taken, with this learning rate and load of experts."""
        self._learning_rate, self.load = learning_rate, load

    def step_ended(self) -> None:
        """A step has ended, with the ranks' agreement on what comes next."""
        traffic = self._engine.traffic
        self._wait_s += traffic.total_wait_s + traffic.control_wait_s

    def row(self, step: int, loss: float, grad_norm: float) -> StepMetrics:
        """The row of `step`, with its loss and gradients' norm. Call `begin` after it."""
        session, total_s = self._session, self._watch.total_s
        steps, tokens = session.step - self.first_step, session.progress.tokens - self._tokens
        flops = session.flops_per_s(steps, total_s)
        fp16 = bool(session.optimizer.scaler_state())
        self.pace.add(steps, tokens, total_s)
        self.peak_bytes = self._memory.peak_bytes
        return StepMetrics(
            step=step,
            loss=loss,
            learning_rate=self._learning_rate,
            tokens=session.progress.tokens,
            step_s=total_s / steps,
            tokens_per_s=tokens / total_s,
            data_wait=self._watch.measured_s / total_s,
            # NCCL's wait() only orders streams: the process never stands still there.
            communication=self._wait_s / total_s if "communication" in self.known else None,
            peak_memory_bytes=self.peak_bytes,
            grad_norm=grad_norm,
            tflops=flops / 1e12 if flops and self._on_cuda else None,
            **utilisation(flops, self._executed, self.peak_flops),
            loss_scale=session.optimizer.loss_scale if fp16 else None,
            skipped_steps=session.optimizer.skipped_steps if fp16 else None,
            **_expert_load(self.load),
            **self._offload_rates(),
        )

    def _offload_rates(self) -> dict[str, float | None]:
        """Rates of drives and of updates on the CPU since the last row; None for what did not happen."""
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
    """The largest imbalance and the mean entropy over routers; empty without experts."""
    if not load:
        return {}
    entropies = [each.entropy for each in load.values() if each.entropy is not None]
    entropy = {"router_entropy": sum(entropies) / len(entropies)} if entropies else {}
    return {"expert_imbalance": max(each.imbalance for each in load.values()), **entropy}
