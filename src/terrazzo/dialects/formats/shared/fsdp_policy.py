"""Mixed precision as FSDP1's `MixedPrecision` and FSDP2's `MixedPrecisionPolicy` say it, read and written.

Both keep one copy of each parameter, in the dtype in which the model was loaded: it is storage, master weights and what
is saved at once, and the optimizer's state has its dtype. The policy names the dtypes of gather and reduction alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.dialects.core.description import LOADED, Description, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.formats.shared.fsdp_words import TORCH_DTYPES, TORCH_NAMES, canonical

__all__ = [
    "FSDP1_POLICY",
    "FSDP2_POLICY",
    "Policy",
    "dtype",
    "dtype_of_sums",
    "dtype_or",
    "keep_casts",
    "load_dtype",
    "narrow_sums",
    "policy_row",
    "write_policy",
]


@dataclass(frozen=True)
class Policy:
    """What tells the two policies apart when they are written.

    Attributes:
        library: its name in messages.
        section: of the document.
        third: the state whose dtype is said beside those of computation and reduction, and its key.
        scaler: of the loss, for fp16.
    """

    library: str
    section: str
    third: tuple[str, str]
    scaler: str


FSDP1_POLICY = Policy("FSDP1", "mixed_precision", ("buffers", "buffer_dtype"), "ShardedGradScaler")
FSDP2_POLICY = Policy("FSDP2", "mp_policy", ("output", "output_dtype"), "torch.amp.GradScaler")


_ONE_COPY = ("weight", "master", "moments", "saved")
"""States that are the one copy of the parameters, or have its dtype."""


def load_dtype(context: ReadingContext, mixed: bool) -> str:
    """The dtype in which the parameters are kept: as told, else fp32 under a policy, as new modules are."""
    if context.load_dtype is not None:
        return TORCH_DTYPES.get(context.load_dtype.lower(), LOADED)
    return "fp32" if mixed else LOADED


def dtype(reader: Reader, key: str) -> Setting[Any]:
    """A dtype by any of its names; None where none is given."""
    setting = reader.take(key)
    name = TORCH_NAMES.get(setting.value)
    return setting if reader.raw(key) == f"torch.{name}" else canonical(reader, key, setting, name)


def dtype_or(dtype: Setting[Any], *fallbacks: Setting[Any] | str) -> Setting[Any]:
    """A dtype where one is given, else the first of the fallbacks that is one, as the library's default."""
    if dtype.value is not None:
        return dtype
    values = (each.value if isinstance(each, Setting) else each for each in fallbacks)
    return Setting(next(value for value in values if value is not None), "default", dtype.key)


def policy_row(stored: str, compute: Setting[Any], reduce: Setting[Any], *, deferred: bool) -> SettingsByPath:
    """The dtype of every state under a policy that says no more, as both are read; `_kept` is the writer's part.

    Args:
        stored: of the parameters when they are wrapped.
        compute, reduce: what the policy says, or its defaults.
        deferred: see `dtype_of_sums`.
    """
    row: SettingsByPath = {f"precision.{state}": Setting(stored, "default") for state in _ONE_COPY}
    sums = dtype_of_sums(stored, reduce.value, deferred=deferred)
    row |= {"precision.accumulate": Setting(sums, "default"), "precision.buffers": Setting(LOADED, "default")}
    return {**row, "precision.compute": compute, "precision.reduce": reduce}


def dtype_of_sums(parameter: str, reduce: str, *, deferred: bool) -> str:
    """The dtype in which gradients of several micro-batches are summed.

    What is reduced is added to `.grad`, which has the parameter's dtype. What a loop has reduced later is summed in the
    dtype of the reduction until then.
    """
    return reduce if deferred else parameter


def narrow_sums(description: Description) -> str:
    """The dtype of sums in a loop that reduces later, where it is narrower than that of reduced ones; else nothing."""
    low = description.value("precision.reduce")
    return low if low in ("bf16", "fp16") and description.value("precision.accumulate") == "fp32" else ""


def keep_casts(reader: Reader, *keys: str) -> None:
    """Switches for casting inputs: harmless at their defaults, which fit a model with one policy."""
    for key in keys:
        switch = reader.take(key)
        if switch.origin == "file":
            why = "inputs are cast wherever weights are, in every other stack"
            reader.keep(key, why, loss="harmless" if switch.value == reader.keys[key].default else "lossy")


def write_policy(draft: Draft, policy: Policy, context: ReadingContext) -> None:
    """Write the dtypes, always both that a policy has: what it means to leave one out has changed in torch."""
    if not draft.is_set("precision.compute"):
        return
    master = draft.value("precision.master") or draft.value("precision.weight", LOADED)
    told = load_dtype(context, False)
    loaded = None if told == LOADED else told
    _write_dtypes(draft, policy, loaded or master)
    _third(draft, policy, loaded or master)
    for state in (*_ONE_COPY, "accumulate"):
        _kept(draft, state, master, loaded)
    if draft.value("precision.loss_scaling") or draft.value("precision.static_loss_scale"):
        scaling = ("precision.loss_scaling", "precision.static_loss_scale")
        draft.lossy(scaling, f"the loop scales the loss: use {policy.scaler}")
    if draft.value("precision.autocast"):
        why = f"{draft.library} casts whole modules, where autocast chooses operator by operator"
        draft.lossy("precision.autocast", why, f"{policy.section}.param_dtype")


def _write_dtypes(draft: Draft, policy: Policy, stored: str) -> None:
    compute = draft.value("precision.compute")
    reduce = draft.value("precision.reduce", compute)
    for path, value, name in (("compute", compute, "param_dtype"), ("reduce", reduce, "reduce_dtype")):
        where, key = f"precision.{path}", f"{policy.section}.{name}"
        if value in TORCH_NAMES:
            draft.put(where, key, TORCH_NAMES[value])
        elif value == stored:
            draft.implied(where)
        else:
            why = "it has the dtype in which the model is loaded; float32 is written: say --load-dtype"
            draft.put(where, key, "float32", why, "lossy")


def _third(draft: Draft, policy: Policy, stored: str) -> None:
    """Buffers and outputs: one of the two can be said, the other is what the library does."""
    third, name = policy.third
    key = f"{policy.section}.{name}"
    loaded = {LOADED: "the dtype in which the model is loaded"}
    for state, natural in (("buffers", LOADED), ("output", draft.value("precision.compute"))):
        path, value = f"precision.{state}", draft.value(f"precision.{state}", natural)
        kept = loaded.get(natural, natural)
        if value in (natural, LOADED):
            draft.holds(path, f"{draft.library} leaves it in {kept}" if state == "output" else "")
        elif state == third and value in TORCH_NAMES:
            draft.put(path, key, TORCH_NAMES[value])
        elif state == "buffers" and value == stored:
            draft.holds(path, f"they keep the dtype in which the model is loaded: {stored}, as the masters do")
        else:
            draft.lossy(path, f"{draft.library} leaves {state} in {kept}: cast them in the model")


def _kept(draft: Draft, state: str, master: str, loaded: str | None) -> None:
    """The verdict on a state that has the dtype of the parameters; sums have it where each micro-batch is reduced.

    Args:
        loaded: that dtype, where it is known.
    """
    path, sums = f"precision.{state}", state == "accumulate"
    value, keep = draft.value(path, master), "gradients are summed in" if sums else "parameters keep"
    if value == loaded:
        draft.implied(path)
    elif loaded is not None and master != loaded:
        draft.lossy(path, f"{keep} {loaded}, in which the model is loaded: load it in {master}")
    elif value != master and state == "weight" and master in ("fp32", LOADED):
        draft.holds(path, f"the one copy kept is the master in {master}, cast at each gather: the same numbers")
    elif value != master:
        what = "sums reduced gradients" if sums else "keeps it"
        draft.lossy(path, f"{draft.library} {what} in the dtype of the parameters, {master}")
    elif master in ("fp32", LOADED):
        draft.implied(path, "parameters keep the dtype in which the model is loaded" if state == "master" else "")
    else:
        draft.lossy(path, f"{keep} the dtype in which the model is loaded: load it in {master}")
