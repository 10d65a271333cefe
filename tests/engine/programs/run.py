"""A program on ranks: the loop of a user of `tz.shard`, on threads of this process or on gloo processes."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo import errors
from terrazzo.engine import checkpoint_activations
from tests.engine.programs import oracle
from tests.engine.programs.grammar import TIERS, Program
from tests.engine.programs.model import Net, Part, build, loss_of
from tests.engine.programs.oracle import Result
from tests.helpers.processes import Pool, RankFailed
from tests.helpers.threads import RanksStuck, run_in_threads

TIMEOUT_S, PROCESS_TIMEOUT_S, START_TIMEOUT_S = 10.0, 60.0, 120.0
SMALL_BLOCK = 4 / 1024
"""MiB of one read or write: a unit takes several."""


def on_threads(program: Program, base: Net) -> list[Result]:
    """The results of all ranks, in rank order; errors as `run_in_threads` raises them."""
    with tempfile.TemporaryDirectory(prefix="programs-") as folder, _quick_turns():
        return run_in_threads(program.world, lambda rank: Rank(program, base, rank, folder).run(), TIMEOUT_S)


@contextlib.contextmanager
def _quick_turns() -> Iterator[None]:
    """Ranks hand over to each other at once: by default a thread that computes keeps others out for 5 ms."""
    before, hook = sys.getswitchinterval(), sys.excepthook
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        sys.excepthook = hook  # joining a group wraps it once more each time


def on_processes(program: Program, pool: Pool) -> list[Result]:
    """The same on processes, which are started where the pool has none. Raises: as on threads."""
    pool.run(abs, 0, timeout_s=START_TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        try:
            return pool.run(in_process, program, folder, timeout_s=PROCESS_TIMEOUT_S)
        except RankFailed as failed:
            raise as_raised(str(failed)) from failed


def as_raised(text: str) -> Exception:
    """The error that a rank's traceback ends with, where it is one of the engine's or a wait without end."""
    if "gave no answer" in text:
        return RanksStuck(text)
    last = re.findall(r"^terrazzo\.errors\.(\w+): (.*)$", text, re.MULTILINE)
    return getattr(errors, last[-1][0])(last[-1][1]) if last else RankFailed(text[-2000:])


def in_process(program: Program, folder: str) -> Result:
    return Rank(program, build(program), torch.distributed.get_rank(), folder).run()


class Rank:
    """One rank's run."""

    def __init__(self, program: Program, base: Net, rank: int, folder: str) -> None:
        self.program, self.rank, self.result = program, rank, Result()
        model = copy.deepcopy(base)
        optimizers: Any = oracle.optimizers_of(program, model)
        units = [name for name, module in model.named_modules() if isinstance(module, Part) and module.node.unit]
        if units:
            checkpoint_activations(model, program.recompute, units=units)
        plan = tz.Plan.named(program.plan).on(**dict(TIERS[program.tier]))
        mode: Any = program.offload_step
        offload = tz.Offload(path=folder, step=mode, block_mib=SMALL_BLOCK, depth=2, direct=False)
        self.model, sharded = tz.shard(
            model,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            plan,
            units=units,
            precision=program.precision,
            mesh=mesh_of(program),
            prefetch=program.prefetch,
            offload=offload.used_under(plan),
        )
        self.optimizers: Sequence[Optimizer] = [sharded] if isinstance(sharded, Optimizer) else sharded

    def run(self) -> Result:
        program = self.program
        self._edit(-1)
        for step in range(program.steps):
            self._beside(step)
            self._backward(step)
            norm = self._clip()
            if norm is not None:
                self.result.norms[step] = norm
            for optim, optimizer in zip(program.optimizers, self.optimizers, strict=False):
                if (step + 1) % optim.every == 0:
                    optimizer.step()
            oracle.forget(program, self.model, self.optimizers)
            self._edit(step)
        with tz.gathered(self.model) as parameters:
            self.result.weights = {name: p.detach().clone() for name, p in parameters.items()}
        return self.result

    def _backward(self, step: int) -> None:
        micro_batches = oracle.micro_batches(self.program, self.rank, step)
        for when in micro_batches:
            last = when is micro_batches[-1]
            with contextlib.nullcontext() if last else tz.accumulate(self.model, local=self.program.local):
                loss = loss_of(self.model, self.program, when)
                loss.backward()  # type: ignore[no-untyped-call]
            self.result.losses[self.rank, step, when.micro] = loss.item()

    def _clip(self) -> float | None:
        if self.program.clip == "terrazzo":
            return tz.clip_grad_norm_(self.model, oracle.MAX_NORM, oracle.norm_of(self.program)).item()
        return oracle.clip(self.program, self.model)

    def _beside(self, step: int) -> None:
        if self.program.beside == "evaluate":
            self.result.outputs[self.rank, step] = oracle.evaluate(self.model, self.program, self.rank, step)
        elif self.program.beside == "discard":
            oracle.discarded(self.model, self.program, self.rank, step)

    def _edit(self, step: int) -> None:
        for edit in (edit for edit in self.program.edits if edit.step == step):
            inside = tz.gathered(self.model, write=True) if edit.kind == "write" else contextlib.nullcontext()
            with inside:
                oracle.edit_weight(self.program, self.model, edit)


def mesh_of(program: Program) -> DeviceMesh | None:
    if program.replicas is None:
        return None
    shape = (program.replicas, program.world // program.replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
