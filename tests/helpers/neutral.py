"""Neutral descriptions of no dialect in particular, for tests of what writes them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from terrazzo.dialects.core.description import Description, Setting, build
from terrazzo.engine import LossScaling, Plan

ROWS = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")


def described(row: str | None = None, **values: Any) -> Description:
    """A description of no dialect. Keyword `a__b` is the path `a.b`."""
    given = {path.replace("__", "."): Setting(value) for path, value in values.items()}
    if row is not None:
        places = Plan.named(row).places()
        given |= {f"sharding.{state}": Setting(str(place)) for state, place in places.items()}
    return build("elsewhere", given)


_DTYPE = st.sampled_from(["fp32", "bf16", "fp16"])
_TIER = st.sampled_from(["device", "cpu", "cpu:0.5", "nvme"])
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "mesh.dp_shard": st.sampled_from([None, 4]),
    "mesh.dp_replicate": st.sampled_from([None, 1, 2]),
    "mesh.tp": st.sampled_from([1, 2]),
    "mesh.sp": st.sampled_from([1, 2]),
    "mesh.cp": st.sampled_from([1, 2]),
    "mesh.pp": st.sampled_from([1, 2]),
    "mesh.ep": st.sampled_from([1, 2]),
    **{f"precision.{name}": _DTYPE for name in ("weight", "compute", "reduce", "accumulate", "master", "moments")},
    **{f"precision.{name}": _DTYPE for name in ("buffers", "output", "saved")},
    "precision.autocast": st.booleans(),
    "precision.loss_scaling": st.sampled_from([None, LossScaling(), LossScaling(interval=10, hysteresis=3)]),
    "offload.weight": _TIER,
    "offload.optim": _TIER,
    "offload.grad": _TIER,
    "offload.pin": st.booleans(),
    "offload.path": st.sampled_from([(), ("/a",), ("/a", "/b", "/c")]),
    "offload.buffers": st.sampled_from([None, 3]),
    "offload.depth": st.sampled_from([None, 3]),
    "offload.step": st.sampled_from(["auto", "overlapped"]),
    "batch.global_batch": st.sampled_from([None, 8]),
    "batch.micro_batch": st.sampled_from([None, 2, "two"]).filter(lambda value: value != "two"),
    "batch.accumulation": st.sampled_from([None, 4]),
    "optimizer.name": st.sampled_from([None, "AdamW", "Adam", "SGD"]),
    "optimizer.lr": st.sampled_from([None, 3e-4]),
    "optimizer.betas": st.just((0.9, 0.95)),
    "optimizer.weight_decay": st.sampled_from([0.0, 0.1]),
    "schedule.name": st.sampled_from([None, "constant", "linear", "cosine", "wsd"]),
    "schedule.warmup_steps": st.sampled_from([0, 1, 20]),
    "schedule.total_steps": st.sampled_from([None, 200]),
    "schedule.final_fraction": st.sampled_from([0.0, 0.1]),
    "training.clip": st.sampled_from([None, 1.0, 0.3]),
    "training.compile": st.booleans(),
    "activation_checkpointing.mode": st.sampled_from(["none", "full"]),
    "prefetch.forward": st.sampled_from([0, 1, 2]),
    "prefetch.backward": st.sampled_from([0, 1, 2]),
    "saving.state": st.sampled_from(["sharded", "local", "full"]),
    "saving.export": st.sampled_from(["none", "full", "hf"]),
    "saving.background": st.booleans(),
}


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    paths = draw(st.lists(st.sampled_from(sorted(_VALUES)), unique=True, max_size=25))
    given = {path: Setting(draw(_VALUES[path])) for path in paths}
    row = draw(st.sampled_from([None, *ROWS]))
    places = {} if row is None else Plan.named(row).places()
    return build("elsewhere", given | {f"sharding.{state}": Setting(str(place)) for state, place in places.items()})
