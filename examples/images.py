"""A small diffusion model of a folder of images, sharded. Runs on a CPU in under a minute:

terrazzo run --ranks 2 examples/images.py --folder images --out runs/images

A folder that is not there is filled with drawings first. With more --epochs the same command goes on.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import terrazzo as tz

SIZE, PATCH = 16, 4


class Images(Dataset[Tensor]):
    """The PNG and JPEG files of a folder, each as (3, SIZE, SIZE) from -1 to 1."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.files[index]) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIZE, SIZE)), dtype=np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


class Block(nn.Module):
    """A transformer block whose scales and shifts come from the time: the unit that is gathered as one."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 4 * width)
        nn.init.zeros_(self.condition.weight)  # time begins to count as it is learnt
        nn.init.zeros_(self.condition.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift, scale_mlp, shift_mlp = self.condition(time)[:, None].chunk(4, dim=-1)
        qkv = self.qkv(self.before(x) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, width / heads)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x) * (1 + scale_mlp) + shift_mlp)


class Denoiser(nn.Module):
    """The velocity from image to noise, of noisy images (batch, 3, SIZE, SIZE) at times (batch,) from 0 to 1."""

    def __init__(self, width: int = 96, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.position = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, width))
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, math.log(1000), width // 2)))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * PATCH**2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * self.frequencies
        condition = self.time(torch.cat([waves.sin(), waves.cos()], dim=1))
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            tokens = block(tokens, condition)
        return nn.functional.fold(self.head(tokens).transpose(1, 2), SIZE, PATCH, stride=PATCH)


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    """Flow matching: between image and noise the velocity is their difference."""
    noise, time = torch.randn_like(images), torch.rand(len(images), device=images.device)
    noisy = torch.lerp(images, noise, time[:, None, None, None])
    return nn.functional.mse_loss(model(noisy, time), noise - images)


@torch.no_grad()
def sample(model: nn.Module, count: int, device: torch.device, steps: int = 32) -> Tensor:
    """Images (count, 3, SIZE, SIZE) from noise. Each forward gathers weights: every rank calls it, with one `steps`."""
    x = torch.randn(count, 3, SIZE, SIZE, device=device)
    for step in range(steps, 0, -1):
        x = x - model(x, torch.full((count,), step / steps, device=device)) / steps
    return x


def draw(folder: Path, count: int = 256) -> None:
    """Discs and squares on dark ground, as PNGs."""
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for index in range(count):
        image = Image.new("RGB", (2 * SIZE, 2 * SIZE), (16, 16, 32))
        left, top, size = drawn.integers(1, 12), drawn.integers(1, 12), drawn.integers(12, 20)
        box, colour = [left, top, left + size, top + size], tuple(drawn.integers(96, 256, 3).tolist())
        pen = ImageDraw.Draw(image)
        (pen.ellipse if index % 2 else pen.rectangle)([int(side) for side in box], fill=colour)
        image.save(folder / f"{index:04}.png")


def save_grid(images: Tensor, path: Path) -> None:
    """Write images (count, 3, SIZE, SIZE) side by side."""
    pixels = images.clamp(-1, 1).add(1).mul(127.5).byte().permute(2, 0, 3, 1).flatten(1, 2)  # (height, width, colours)
    Image.fromarray(pixels.cpu().numpy()).resize((pixels.shape[1] * 4, pixels.shape[0] * 4)).save(path)


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small diffusion model of a folder of images, sharded.")
    parser.add_argument("--folder", type=Path, default=Path("images"), help="of PNG and JPEG files")
    parser.add_argument("--out", type=Path, default=Path("runs/images"), help="for checkpoints and samples")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="images per rank and step")
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that read images")
    parser.add_argument("--plan", default="zero3", help="as for tz.shard")
    return parser.parse_args()


def loader_of(folder: Path, batch: int, workers: int) -> DataLoader[Tensor]:
    """Each rank's own images, as many batches on each."""
    images = Images(folder)
    sampler: DistributedSampler[Tensor] = DistributedSampler(images, drop_last=True)
    loader = DataLoader(images, batch, sampler=sampler, num_workers=workers, drop_last=True)
    if not len(loader):
        raise SystemExit(f"{folder} has {len(images)} images, and a step takes more: give a smaller --batch.")
    return loader


def main() -> None:
    told = asked()
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if rank == 0 and not told.folder.exists():
        draw(told.folder)
    dist.barrier()
    loader = loader_of(told.folder, told.batch, told.workers)

    torch.manual_seed(0)
    model = Denoiser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    model, optimizer = tz.shard(model, optimizer, plan=told.plan, units=[Block])
    ema = tz.EMA(model, decay=0.99)  # before loading: checkpoints restore it
    torch.manual_seed(1 + rank)  # every rank draws its own noise
    resumed = tz.checkpoint.load_newest(told.out, model, optimizer)

    for epoch in range(resumed.extra["epochs"] if resumed else 0, told.epochs):
        loader.sampler.set_epoch(epoch)  # another order
        total = torch.zeros((), device=device)
        for images in loader:
            loss = loss_of(model, images.to(device))
            loss.backward()
            tz.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
            total += loss.detach() / len(loader) / ranks
        if (epoch + 1) % 20 == 0 or epoch + 1 == told.epochs:
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch + 1} | loss {total.item():.4f}", flush=True)
            path = tz.checkpoint.step_path(told.out, epoch + 1)
            tz.checkpoint.save(path, model, optimizer, extra={"epochs": epoch + 1})

    with ema.swapped():
        samples = sample(model, 8, device)
    if rank == 0:
        save_grid(samples, told.out / "samples.png")
        print(f"eight samples are in {told.out / 'samples.png'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
