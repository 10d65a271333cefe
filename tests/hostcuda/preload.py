"""What the server imports from which ranks are forked: the device first, since torch asks for it at its import."""

import hostcuda

hostcuda.load()

# isort: split
import torch._dynamo
import torch.distributed.fsdp

import terrazzo.engine
import tests.helpers.processes
