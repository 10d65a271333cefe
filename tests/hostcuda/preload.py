"""What the server imports from which ranks are forked: the device first, since torch asks for it at its import."""

import contextlib

import hostcuda

hostcuda.load()

# isort: split
import torch._dynamo
import torch.distributed.fsdp

import terrazzo.engine
import tests.helpers.processes

# isort: split
with contextlib.suppress(ImportError):  # each takes a rank one to two seconds
    import transformers

    transformers.Trainer, transformers.LlamaForCausalLM  # noqa: B018  (it imports what is asked for)
with contextlib.suppress(ImportError):
    import lightning.pytorch
