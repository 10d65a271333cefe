"""Checkpoints that other programs wrote, one module or folder for each format, imported when one is opened.

In reading order:

    parts         what several formats share: pickles that are not run, names, optimizers
    safetensors   a file, a folder, or a Hugging Face model folder with an index
    torch_file    a file of `torch.save`: a model's state dict, or a program's with the optimizer's
    dcp_metadata  the `.metadata` of a torch.distributed.checkpoint folder
    dcp           such a folder: FSDP2, sharded FSDP1, torchtitan, Accelerate
    deepspeed     DeepSpeed's folders
    huggingface   the Trainer's `checkpoint-N`, and what Accelerate's `save_state` writes
"""

from __future__ import annotations

from pathlib import Path

from terrazzo.checkpoint.importers.parts.numbering import NOT_KNOWN, ModelNames
from terrazzo.checkpoint.source import Source
from terrazzo.errors import BadInput
from terrazzo.files import CHECKPOINTS
from terrazzo.messages import listed

__all__ = ["open_foreign"]

_KNOWN = (
    "folders of DeepSpeed (with 'latest'), of torch.distributed.checkpoint (with '.metadata'), of the Trainer, of"
    " Accelerate and of *.safetensors, and files of safetensors and of torch.save"
)
_MEGATRON = ("mp_rank_*/model_optim_rng.pt", "iter_*/mp_rank_*/model_optim_rng.pt")
_ARCHIVE, _PICKLE = b"PK\x03\x04", b"\x80"  # what torch.save writes, and what it wrote until torch 1.6


def open_foreign(path: Path, names: ModelNames = NOT_KNOWN) -> Source:
    """The checkpoint at `path`, of whichever known format.

    Args:
        names: of the model's parameters, where they are known: some formats only number the optimizer's states.

    Raises:
        BadInput: it is of no known format, or what its format does not allow.
    """
    from terrazzo.checkpoint.importers import safetensors, torch_file

    if path.is_dir():
        return _open_folder(path, names)
    try:
        with path.open("rb") as file:
            first = file.read(9)
    except OSError as error:
        raise BadInput(f"There is no checkpoint '{path}' that can be read: {error.strerror}.") from None
    if path.suffix == ".safetensors" or first[8:] == b"{":
        return safetensors.SafetensorsCheckpoint(path, names.order)
    if first.startswith((_ARCHIVE, _PICKLE)):
        return torch_file.TorchFile(path, names)
    raise BadInput(f"The file '{path}' is no checkpoint: it begins with {first!r}. Known are {_KNOWN}.")


def _open_folder(path: Path, names: ModelNames) -> Source:
    from terrazzo.checkpoint.importers import dcp, deepspeed, huggingface, safetensors

    if dcp.recognises(path):
        return dcp.DcpCheckpoint(path, names)
    if huggingface.recognises(path):
        return huggingface.open_folder(path, names)
    if deepspeed.recognises(path):
        return deepspeed.DeepSpeedCheckpoint(path)
    if (path / safetensors.INDEX_FILE).exists() or any(path.glob("*.safetensors")):
        return safetensors.SafetensorsCheckpoint(path, names.order)
    if any(file for pattern in _MEGATRON for file in path.glob(pattern)):
        raise BadInput(
            f"The folder '{path}' is of Megatron-LM's format 'torch', in which ranks have parts of tensors and nothing"
            " says how they fit together: load it there and save the state dict of the whole model with torch.save."
        )
    entries = sorted(entry.name for entry in path.iterdir())
    below = f" Did you mean '{path / CHECKPOINTS}'?" if CHECKPOINTS in entries else ""  # of a run's log.folder
    raise BadInput(
        f"The folder '{path}' is no checkpoint: it holds {listed(entries, 10) or 'nothing'}.{below} Known are {_KNOWN}."
    )
