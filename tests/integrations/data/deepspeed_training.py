"""A DeepSpeed script as they are written: a JSON, an argument parser, the engine's loop. It knows DeepSpeed alone."""

import argparse

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--moe", action="store_true")
    args = deepspeed.add_config_arguments(parser).parse_args()

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    inputs = torch.randn(64, 12)
    data = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
    parameters = net.parameters()
    if args.moe:
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": list(parameters)})

    engine, _, loader, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters, training_data=data)
    assert isinstance(engine, DeepSpeedEngine)
    device = get_accelerator().device_name(engine.local_rank)
    logger.info("stage %d", engine.zero_optimization_stage())
    for _ in range(args.epochs):
        for batch, label in loader:
            loss = nn.functional.cross_entropy(engine(batch.to(device)), label.to(device))
            engine.backward(loss)
            engine.step()
            print(f"rank {engine.global_rank} | {loss.item():.9e}", flush=True)
    engine.eval()
    with torch.no_grad():
        print(f"rank {engine.global_rank} | {engine(inputs.to(device)).double().sum().item():.9e}", flush=True)


if __name__ == "__main__":
    main()
