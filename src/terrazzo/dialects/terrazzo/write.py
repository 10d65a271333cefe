"""Writing Terrazzo's YAML from a description."""

from __future__ import annotations

import inspect

from terrazzo.config import KEYS
from terrazzo.dialects.description import MODEL_AXES, STATES, Description, shown
from terrazzo.dialects.dialect import Context, Writing
from terrazzo.dialects.meaning import APART, degrees, left
from terrazzo.dialects.terrazzo.draft import HubDraft
from terrazzo.dialects.terrazzo.precision import write_precision
from terrazzo.engine import ELEMENTWISE, OFFLOADS

__all__ = ["write"]

_OPTIMIZERS = {each.__name__: each for each in sorted(ELEMENTWISE, key=lambda each: each.__name__)}
_SCHEDULES = KEYS["schedule.name"].choices
_ARGUMENTS = ("optimizer.betas", "optimizer.eps", "optimizer.options")
_MIB = 2**20


def write(description: Description, context: Context) -> Writing:
    """The document. Of its own descriptions, what was left to defaults is left to them again."""
    draft = _Hub(description)
    draft.plan()
    draft.tiers()
    draft.mesh()
    draft.units()
    write_precision(draft)
    draft.batch(context)
    draft.optimizer()
    draft.schedule()
    draft.training()
    draft.activation_checkpointing()
    draft.saving()
    writing = draft.finish()
    order = [key.partition(".")[0] for key in KEYS]
    document = {section: writing.document[section] for section in sorted(writing.document, key=order.index)}
    return Writing(document, writing.verdicts)


class _Hub(HubDraft):
    # -- where states live -----------------------------------------------------------------------------------------

    def plan(self) -> None:
        paths = [f"sharding.{state}" for state in STATES]
        if self.left(*paths):
            return
        key = "plan" if self.setting(paths[0]).key == "plan" and not self.foreign else "plan.name"
        row = self.description.row
        if self._needs_mesh() and degrees(self.description)["dp_replicate"] in (None, 1):
            self.refuse(
                paths,
                f"{row or 'this plan'} splits over one node's ranks and copies between nodes, and how many nodes there"
                " are is not known: write the degrees in the file, say --world, or choose full sharding",
            )
        elif row is not None and self.setting("sharding.weight").key != "plan.weight":
            self.put(paths, key, row + self._suffix())
        else:
            for path, state in zip(paths, STATES, strict=True):
                tier = self._tier_in_place(state)
                self.put(path, f"plan.{state}", self.value(path) + (f"@{tier}" if tier else ""))

    def _needs_mesh(self) -> bool:
        return any(axis in str(self.value(f"sharding.{state}")) for state in STATES for axis in "SR")

    def _suffix(self) -> str:
        """`@cpu` or `@cpu:0.7`, if the plan's name said so in the source, else nothing."""
        said = {
            state: self.value(f"offload.{state}").partition(":")
            for state in STATES
            if self._said_by(state, ("plan", "plan.name"))
        }
        told, shares = {state: tier for state, (tier, _, _) in said.items()}, {share for _, _, share in said.values()}
        own = {state for state in STATES if self._said_by(state, (f"offload.{state}",))}
        for name, tiers in OFFLOADS.items():
            if len(shares) == 1 and told.items() <= tiers.items() and set(tiers) <= {*told, *own}:
                return "@" + ":".join(part for part in (name, *shares) if part)
        return ""

    def _tier_in_place(self, state: str) -> str:
        return self.value(f"offload.{state}") if self._said_by(state, (f"plan.{state}",)) else ""

    def _said_by(self, state: str, keys: tuple[str, ...]) -> bool:
        return not self.foreign and state != "between" and self.setting(f"offload.{state}").key in keys

    def tiers(self) -> None:
        for state in ("weight", "grad", "optim"):
            path = f"offload.{state}"
            if self._said_by(state, ("plan", "plan.name", f"plan.{state}")):
                self.implied(path, key=self.setting(path).key)
            elif self.value(path, "device") != "device" or self.setting(path).key == path:
                self.carry(path)
        on_device = all(self.value(f"offload.{state}", "device") == "device" for state in ("weight", "grad", "optim"))
        idle = self.foreign and on_device
        for name in ("path", "step", "threads", "pin", "direct", "depth", "digest", "block_bytes", "buffers"):
            self._way_of_offload(f"offload.{name}", idle)

    def _way_of_offload(self, path: str, idle: bool) -> None:
        """How states come and go. `idle`: none does, and only what the file says is said again."""
        value, origin = self.value(path), self.setting(path).origin
        if path == "offload.buffers" and not idle:
            self.lossy(path, "the number of staging buffers follows from plan.prefetch")
        elif idle and (origin != "file" or path == "offload.buffers"):
            self.implied(path, "nothing is offloaded")
        elif path == "offload.path" and value and not self.left(path):
            self.put(path, path, value[0] if len(value) == 1 else list(value))
        elif path == "offload.block_bytes" and value is not None and not self.left(path):
            self.put(path, "offload.block_mib", value / _MIB)
        elif path not in ("offload.path", "offload.block_bytes"):
            self.carry(path)

    def mesh(self) -> None:
        replicas = degrees(self.description)["dp_replicate"]
        if self.foreign and self.value("mesh.dp_replicate") is None and replicas not in (None, 1):
            self.put("mesh.dp_replicate", "plan.mesh.dp_replicate", replicas)
        else:
            self.carry("mesh.dp_replicate")
        others = [axis for axis in MODEL_AXES if self.value(f"mesh.{axis}", 1) != 1]
        if others and self.value("mesh.dp_shard") is not None:
            self.lossy("mesh.dp_shard", f"without {' and '.join(others)} more ranks are left to it: it takes them all")
        else:
            self.carry("mesh.dp_shard")
        if self.foreign and self.value("mesh.world") is not None:
            why = "how many `terrazzo train` starts by itself on one machine; torchrun and Slurm say it themselves"
            self.put("mesh.world", "launch.ranks", self.value("mesh.world"), why)
        else:
            self.carry("mesh.world")
        for axis in others:
            self.refuse(f"mesh.{axis}", "`terrazzo train` has data-parallel axes only: set it to 1")

    def units(self) -> None:
        policy, classes = self.value("units.policy"), self.value("units.classes", ())
        if policy == "classes" and classes:
            self.put(["units.policy", "units.classes"], "plan.units", list(classes))
        elif policy == "none":
            self.put("units.policy", "plan.units", [], "the whole model is one unit")
        elif policy == "min_numel":
            self.lossy(["units.policy", "units.min_numel"], "units are found by themselves: the model's repeated block")
        else:
            self.implied(["units.policy", "units.min_numel", "units.classes"])
        if self.value("units.ignored"):
            self.refuse("units.ignored", "every parameter is sharded: there is no list of exceptions yet; remove it")
        self._prefetch()

    def _prefetch(self) -> None:
        both = ["prefetch.forward", "prefetch.backward"]
        if self.left(*both):
            return
        forward, backward = self.value(both[0]), self.value(both[1])
        ahead = max(value for value in (forward, backward, 0) if value is not None)
        self.put([path for path in both if self.value(path) == ahead], "plan.prefetch", ahead)
        for path in both:
            if self.value(path, ahead) != ahead:
                self.lossy(path, f"one number for both directions, plan.prefetch {ahead}", "plan.prefetch")

    # -- batch, optimizer, schedule --------------------------------------------------------------------------------

    def batch(self, context: Context) -> None:
        self.carry("batch.micro_batch", "batch.sequence_length")
        whole, micro = self.value("batch.global_batch"), self.value("batch.micro_batch")
        count, ranks = self.value("batch.accumulation"), left(self.description, context.world, APART)
        if whole is not None:
            self.carry("batch.global_batch")
            self._agrees(whole, micro, count, ranks)
        elif micro and count and ranks:
            self.put("batch.accumulation", "batch.global_batch", micro * count * ranks)
        elif count is not None:
            need = "the micro-batch" if not micro else "the number of ranks (--world)"
            why = f"Terrazzo counts the global batch, which needs {need} as well: set batch.global_batch"
            self.lossy("batch.accumulation", why)

    def _agrees(self, whole: int, micro: int | None, count: int | None, ranks: int | None) -> None:
        if count and micro and ranks and micro * count * ranks != whole:
            why = f"global_batch {whole} is not micro_batch {micro} × accumulation {count} × {ranks} ranks"
            self.lossy("batch.accumulation", why)
        else:
            self.implied("batch.accumulation", key="batch.global_batch")

    def optimizer(self) -> None:
        name = self.value("optimizer.name")
        if name is not None and name not in _OPTIMIZERS:
            what = f"{name} does not work on flat shards, or is not in torch.optim: use one of {', '.join(_OPTIMIZERS)}"
            self.refuse("optimizer.name", what)
        else:
            self.carry("optimizer.name")
        self.carry("optimizer.lr", "optimizer.weight_decay")
        self._options(name or "AdamW")

    def _options(self, name: str) -> None:
        if self.foreign and name not in _OPTIMIZERS:
            paths = [path for path in _ARGUMENTS if self.value(path)]
            self.refuse(paths, f"it goes with optimizer.name {name}, which there is not")
            return
        known = inspect.signature(_OPTIMIZERS[name]).parameters if name in _OPTIMIZERS else {}
        for path in ("optimizer.betas", "optimizer.eps"):
            field = path.rpartition(".")[2]
            if self.left(path) or self.value(path) is None:
                continue
            if field in known or not self.foreign:
                self.copy(path, f"optimizer.options.{field}")
            else:
                self.lossy(path, f"torch.optim.{name} has no {field}")
        options = self.value("optimizer.options", {})
        if not options or self.left("optimizer.options"):
            return
        for field in options:
            if field in known or not self.foreign:
                self.write(f"optimizer.options.{field}", options[field])
        if (unknown := [field for field in options if field not in known]) and self.foreign:
            self.lossy("optimizer.options", f"torch.optim.{name} has no {', '.join(unknown)}", "optimizer.options")
        else:
            self.implied("optimizer.options", key="optimizer.options")

    def schedule(self) -> None:
        name = self.value("schedule.name")
        if name is not None and name not in _SCHEDULES:
            self.refuse("schedule.name", f"there is no schedule {name}: choose one of {', '.join(_SCHEDULES)}")
        else:
            self.carry("schedule.name")
        self.carry("schedule.total_steps")
        self._warmup()
        self.carry("schedule.decay_steps")
        if name == "constant":
            self.implied("schedule.final_fraction")
        if name != "constant" or not self.foreign:
            self.carry("schedule.final_fraction")
        if options := self.value("schedule.options"):
            self.lossy(
                "schedule.options", f"Terrazzo's schedules warm up linearly from zero and know no {shown(options)}"
            )

    def _warmup(self) -> None:
        warmup, total = self.value("schedule.warmup_steps", 0), self.value("schedule.total_steps")
        if total and warmup > total and self.foreign:
            why = f"a warm-up of {warmup} steps is longer than the run's {total}: it ends with the run"
            self.put("schedule.warmup_steps", "schedule.warmup_steps", total, why, "lossy")
        else:
            self.carry("schedule.warmup_steps")
        share = self.value("schedule.warmup_fraction")
        if share and total:
            self.put("schedule.warmup_fraction", "schedule.warmup_steps", round(share * total))
        elif share:
            self.lossy("schedule.warmup_fraction", "the length of the run is not known: set schedule.warmup_steps")

    # -- the loop --------------------------------------------------------------------------------------------------

    def training(self) -> None:
        self.carry("training.clip", "training.compile", "training.seed")
        device = self.value("training.device")
        if device is None and self.foreign:
            self.implied("training.device")
        elif not self.left("training.device"):
            self.put("training.device", "launch.device", device or "auto")

    def activation_checkpointing(self) -> None:
        mode, every = self.value("activation_checkpointing.mode"), self.value("activation_checkpointing.every")
        paths = ["activation_checkpointing.mode", "activation_checkpointing.every"]
        key = "train.activation_checkpointing"
        if mode in ("none", "full", "selective") and not self.left(*paths):
            self.put(paths, key, mode)
        elif mode == "every" and every:
            self.put(paths, key, f"every_{every}")
        elif mode not in (None, "none", "full", "selective"):
            self.lossy(paths, f"there is no mode {mode}; full is written", key)
            self.write(key, "full")
        if self.value("activation_checkpointing.ops"):
            self.carry("activation_checkpointing.ops")
        self._activation_offload(mode)

    def _activation_offload(self, mode: str | None) -> None:
        path = "activation_checkpointing.offload"
        if not self.value(path):
            if self.is_set(path) and not self.left(path):
                self.put(path, "offload.activations", "device") if not self.foreign else self.implied(path)
        elif mode in (None, "none"):
            self.lossy(path, "it moves what activation checkpointing keeps, and there is none")
        else:
            self.put(path, "offload.activations", "cpu")

    def saving(self) -> None:
        export, state = self.value("saving.export", "none"), self.value("saving.state", "sharded")
        if self.setting("saving.export").key or (self.foreign and export != "none"):
            self.put("saving.export", "checkpoint.save_format", "hf" if export != "none" else "terrazzo")
        self.implied("loading.low_memory", "each rank reads its own part of the weights")
        self.implied("loading.broadcast", "all ranks start from the same values")
        more = "" if state == "sharded" else "checkpoints are sharded, and resume on any number of ranks"
        self.implied("saving.state", more)
        self.carry("saving.every", "saving.keep_last", "saving.folder", "saving.background")
