"""What saving and loading take, beside torch.distributed.checkpoint, DeepSpeed and torch.save, on gloo ranks.

All contenders hold the same trained decoder in the same processes and take turns in random order. Files go to one disk,
which is drained before each turn; loads find them in the page cache.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import terrazzo as tz
from benchmarks.cpu.cases import CASES
from benchmarks.cpu.contenders import CONTENDERS, Terrazzo, installed
from benchmarks.cpu.loops import Loop
from benchmarks.cpu.rank import join
from benchmarks.environment import processor, versions
from terrazzo.checkpoint import Saver
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.engine import ModelState

KINDS = ("save", "blocked", "load")


@dataclass(frozen=True)
class Effort:
    """What is run: turns of each contender, after one that is not counted."""

    case: str = "traffic"
    rounds: int = 5
    seed: int = 0


Turns = dict[str, list[float]]
"""Seconds by contender, of the slower rank."""


def measure(effort: Effort, scratch: Path) -> dict[str, Any]:
    """Everything, as plain numbers. `scratch` is on the disk that is measured."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="terrazzo-bench-", dir=scratch) as folder:
        spawn(_rank_of_two, (folder, effort), nprocs=2)
        spawn(_rank_of_three, (folder, effort), nprocs=3)
        ranks = [json.loads((Path(folder) / f"2-{rank}.json").read_text()) for rank in range(2)]
        resharded = [json.loads((Path(folder) / f"3-{rank}.json").read_text()) for rank in range(3)]
        verify_s = _verify_s(Path(folder) / "kept")
        total_bytes = sum(file.stat().st_size for file in (Path(folder) / "kept").glob("*.safetensors"))
    found = {key: {name: _slowest([rank[key][name] for rank in ranks]) for name in ranks[0][key]} for key in KINDS}
    found["reshard"] = {"terrazzo": _slowest([rank["reshard"] for rank in resharded])}
    return {
        "date": str(date.today()),
        "processor": processor(),
        "versions": versions("terrazzo", "torch", "deepspeed"),
        "effort": asdict(effort),
        "about": CASES[effort.case].describe(),
        "state_bytes": [rank["state_bytes"] for rank in ranks],
        "total_bytes": total_bytes,
        "turns": found,
        "background_s": _slowest([rank["background_s"] for rank in ranks]),
        "peak_bytes": {key: max(rank["peak_bytes"][key] for rank in ranks) for key in ranks[0]["peak_bytes"]},
        "verify_s": verify_s,
    }


def _slowest(ranks: list[list[float]]) -> list[float]:
    return [max(turn) for turn in zip(*ranks, strict=True)]


def _verify_s(path: Path) -> float:
    source = tz.checkpoint.open_source(path)
    assert isinstance(source, TerrazzoCheckpoint)
    begun = time.perf_counter()
    source.check(lambda kind: True, 0, 1)
    return time.perf_counter() - begun


# -- one rank ----------------------------------------------------------------------------------------------------------


class Own:
    """Terrazzo's `zero3`."""

    def __init__(self, loop: Terrazzo) -> None:
        self.model, self.optimizer = loop.model, loop.optimizer
        self.saver = Saver(self.model, self.optimizer)

    def save(self, path: Path) -> None:
        tz.checkpoint.save(path, self.model, self.optimizer, {})

    def start(self, path: Path) -> Callable[[], object]:
        self.saver.save(path, {})
        return self.saver.wait

    def load(self, path: Path) -> None:
        tz.checkpoint.load(path, self.model, self.optimizer)

    def tensors(self) -> list[Tensor]:
        return [piece.tensor for piece in ModelState(self.model).pieces()]


class Dcp:
    """FSDP2 with torch.distributed.checkpoint, as its tutorial says."""

    def __init__(self, loop: Loop) -> None:
        self.model, self.optimizer = loop.model, loop.optimizer
        self.group = dist.new_group(backend="gloo")

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=path)

    def start(self, path: Path) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(self._state(), checkpoint_id=path, process_group=self.group)
        return future.result  # type: ignore[no-any-return]

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class DeepSpeed:
    """Its stage 3."""

    def __init__(self, loop: Any) -> None:
        self.engine = loop.engine

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path), tag="t")

    def load(self, path: Path) -> None:
        assert self.engine.load_checkpoint(str(path), tag="t")[0]


class Bench:
    """The contenders of a rank, taking turns."""

    def __init__(self, folder: Path, effort: Effort) -> None:
        self.folder, self.effort, self.rank = folder, effort, dist.get_rank()
        self.count, self.shuffle = 0, random.Random(effort.seed)
        self.own = Own(_trained("terrazzo-zero3", effort))
        self.dcp = Dcp(_trained("fsdp2", effort))
        self.deepspeed = DeepSpeed(_trained("deepspeed-3", effort)) if installed(["deepspeed-3"]) else None
        tensors = self.own.tensors()
        self.state_bytes = sum(tensor.nbytes for tensor in tensors)
        self.copy = [torch.zeros_like(tensor) for tensor in tensors]

    def saves(self) -> Turns:
        acts: dict[str, Callable[[Path], object]] = {
            "dd": self._dd,
            "terrazzo": self.own.save,
            "dcp": self.dcp.save,
            "torch.save": self._torch_save,
        }
        if self.deepspeed is not None:
            acts["deepspeed"] = self.deepspeed.save
        return self._turns({name: partial(self._timed, act) for name, act in acts.items()})

    def blocked(self) -> tuple[Turns, list[float]]:
        """Seconds that a save in the background holds up training, and until ours was complete."""
        complete: list[float] = []

        def started(start: Callable[[Path], Callable[[], object]], note: list[float]) -> float:
            begun, path = time.perf_counter(), self._fresh()
            wait = start(path)
            held_s = time.perf_counter() - begun
            wait()
            note.append(time.perf_counter() - begun)
            return held_s

        turns = self._turns(
            {
                "memory copy": lambda: _seconds(self._copy),
                "terrazzo": lambda: started(self.own.start, complete),
                "dcp": lambda: started(self.dcp.start, []),
            }
        )
        return turns, complete[1:]

    def loads(self) -> Turns:
        acts: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
            "terrazzo": (self.own.save, self.own.load),
            "dcp": (self.dcp.save, self.dcp.load),
        }
        if self.deepspeed is not None:
            acts["deepspeed"] = self.deepspeed.save, self.deepspeed.load
        paths = {name: self.folder / ("kept" if name == "terrazzo" else f"kept-{name}") for name in acts}
        for name, (save, _) in acts.items():
            save(paths[name])
        return self._turns({name: partial(_seconds, partial(load, paths[name])) for name, (_, load) in acts.items()})

    def peaks(self) -> dict[str, int]:
        """Memory above what was there, at the highest point of each."""
        found = {}
        with _peak() as save:
            self.own.save(self._fresh())
        with _peak() as load:
            self.own.load(self.folder / "kept")
        found["save"], found["load"] = save[0], load[0]
        return found

    def _timed(self, save: Callable[[Path], object]) -> float:
        return _seconds(partial(save, self._fresh()))

    def _turns(self, acts: dict[str, Callable[[], float]]) -> Turns:
        found: Turns = {name: [] for name in acts}
        for _ in range(1 + self.effort.rounds):
            for name in self.shuffle.sample(list(acts), len(acts)):
                self._clean()
                dist.barrier()
                found[name].append(acts[name]())
                dist.barrier()
        return {name: turns[1:] for name, turns in found.items()}

    def _fresh(self) -> Path:
        self.count += 1
        return self.folder / f"turn-{self.count}"

    def _clean(self) -> None:
        dist.barrier()
        if self.rank == 0:
            for path in self.folder.glob("turn-*"):
                shutil.rmtree(path)
            os.sync()

    def _copy(self) -> None:
        for to, tensor in zip(self.copy, self.own.tensors(), strict=True):
            to.copy_(tensor)

    def _dd(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        whole = f"of={path / str(self.rank)}"
        command = ["dd", "if=/dev/zero", whole, "bs=4M", f"count={self.state_bytes}", "iflag=count_bytes", "conv=fsync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    def _torch_save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / f"{self.rank}.pt").open("wb") as file:
            torch.save(self.own.tensors(), file)
            os.fsync(file.fileno())


def _trained(name: str, effort: Effort) -> Any:
    """A contender after a step, so that there are moments."""
    case = CASES[effort.case]
    torch.manual_seed(effort.seed)
    loop = CONTENDERS[name].start(case.model(), case)
    tokens, targets = case.tokens(0, dist.get_rank())
    loss = torch.nn.functional.cross_entropy(loop.model(tokens).flatten(0, 1), targets.flatten())
    loop.backward(loss, True)
    loop.update()
    return loop


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The highest resident memory inside, above that at the start, in the list afterwards."""
    Path("/proc/self/clear_refs").write_text("5")
    found: list[int] = []
    before = _status("VmRSS")
    yield found
    found.append(_status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def _rank_of_two(rank: int, folder: str, effort: Effort) -> None:
    join(rank, 2, os.path.join(folder, "store-2"), limit_s=300)
    bench = Bench(Path(folder), effort)
    found: dict[str, Any] = {"state_bytes": bench.state_bytes, "save": bench.saves()}
    found["blocked"], found["background_s"] = bench.blocked()
    found["load"] = bench.loads()
    found["peak_bytes"] = bench.peaks()
    bench.own.saver.close()
    (Path(folder) / f"2-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _rank_of_three(rank: int, folder: str, effort: Effort) -> None:
    join(rank, 3, os.path.join(folder, "store-3"), limit_s=300)
    loop = _trained("terrazzo-zero1", effort)
    times = []
    for _ in range(1 + effort.rounds):
        dist.barrier()
        times.append(_seconds(lambda: tz.checkpoint.load(Path(folder) / "kept", loop.model, loop.optimizer)))
    (Path(folder) / f"3-{rank}.json").write_text(json.dumps({"reshard": times[1:]}))
    dist.barrier()
    dist.destroy_process_group()
