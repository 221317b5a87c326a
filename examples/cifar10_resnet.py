"""CIFAR-10 as in the DGC paper: a ResNet of He et al., density 0.1% after a warm-up of four epochs.

    horovodrun -np 4 python examples/cifar10_resnet.py --data cifar-10-batches-py --depth 110

The data are the "CIFAR-10 python version", unpacked (https://www.cs.toronto.edu/~kriz/cifar.html). Four ranks with 32
images each make the paper's batch of 128. The paper reports 93.75% without compression and 93.87% with it at depth 110.
Selection per bucket and bfloat16 values are ours; with --values fp32 --dense-values fp32 the values are the paper's.
He et al. subtract the mean of each pixel; here it is that of each channel.
"""

from __future__ import annotations

import argparse
import pickle
import time
from pathlib import Path

import common
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data.distributed import DistributedSampler

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, by channel
PADDING = 4  # pixels by which a training image may be moved
LR_FALLS_AT = (0.5, 0.75)  # of all epochs, to a tenth each time
DEEP, GENTLE_STEPS = 110, 400  # He et al. start a net this deep with a tenth of the learning rate
TEST_BATCH = 500


def read_batches(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    """Images (uint8, n x 3 x 32 x 32) and labels of some of the files of the data set.

    They are pickles: read only those that come from where you trust.
    """
    images, labels = [], []
    for name in names:
        with (folder / name).open("rb") as file:
            batch = pickle.load(file, encoding="bytes")
        images.append(torch.tensor(batch[b"data"], dtype=torch.uint8).view(-1, 3, 32, 32))
        labels.append(torch.tensor(batch[b"labels"]))
    return torch.cat(images), torch.cat(labels)


def load(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test data from an unpacked ``cifar-10-batches-py``."""
    train = sorted(path.name for path in folder.glob("data_batch_*"))
    if not train or not (folder / "test_batch").exists():
        raise SystemExit(
            f"{folder} has no files data_batch_1 ... and test_batch; unpack cifar-10-python.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html and give the folder cifar-10-batches-py"
        )
    return read_batches(folder, train), read_batches(folder, ["test_batch"])


def prepared(images: Tensor, draw: torch.Generator | None = None) -> Tensor:
    """Images as the net takes them; with `draw` each is moved by up to four pixels and mirrored or not."""
    if draw is not None:
        count, side = len(images), images.shape[-1]
        padded = nn.functional.pad(images, [PADDING] * 4)
        down, right = torch.randint(0, 2 * PADDING + 1, (2, count, 1), generator=draw) + torch.arange(side)
        images = padded[torch.arange(count)[:, None, None], :, down[:, :, None], right[:, None, :]].permute(0, 3, 1, 2)
        mirrored = torch.rand(count, generator=draw) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


class Block(nn.Module):
    """Two convolutions beside the identity, which is thinned out where the block is smaller than what it gets."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if before == width else 2
        self.first = nn.Conv2d(before, width, 3, self.stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """n x before x side x side -> n x width x side/stride x side/stride."""
        inner = self.second_norm(self.second(relu(self.first_norm(self.first(x)))))
        kept = x[:, :, :: self.stride, :: self.stride]
        padding = inner.shape[1] - kept.shape[1]
        return relu(inner + nn.functional.pad(kept, (0, 0, 0, 0, padding // 2, padding - padding // 2)))


def resnet(depth: int) -> nn.Sequential:
    """He et al. 2016, section 4.2: ``6n + 2`` layers, widths 16, 32, 64."""
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise SystemExit(f"--depth must be 6n + 2 (20, 32, 44, 56, 110), got {depth}")
    widths = [16] + [width for width in (16, 32, 64) for _ in range(blocks)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        *(Block(before, width) for before, width in zip(widths, widths[1:])),  # noqa: B905, RUF007
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    return model


def learning_rate(args: argparse.Namespace, epoch: int, step: int) -> float:
    """Of a step of the run, which is in that epoch."""
    gentle = args.depth >= DEEP and step < GENTLE_STEPS
    return args.lr * 0.1 ** (sum(epoch >= share * args.epochs for share in LR_FALLS_AT) + gentle)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str) -> float:
    """The share of the test images that the model gets right; each rank looks at a part of them."""
    for name, buffer in model.named_buffers():  # each rank's batch norm has seen its own images only
        if buffer.is_floating_point():
            # by way of the host, which works with a Horovod without CUDA too
            buffer.copy_(hvd.allreduce(buffer.cpu(), name=f"buffer.{name}"))
    model.eval()
    own = slice(hvd.rank(), None, hvd.size())
    parts = zip(images[own].split(TEST_BATCH), labels[own].split(TEST_BATCH), strict=True)
    right = sum(int((model(prepared(x).to(device)).argmax(1).cpu() == y).sum()) for x, y in parts if len(y))
    model.train()
    return hvd.allreduce(torch.tensor(right), name="right", op=hvd.Sum).item() / len(labels)


def main() -> None:
    """Train on all ranks and report from rank 0."""
    parser = common.arguments(
        "A ResNet on CIFAR-10 with the settings of the DGC paper.",
        lr_falls="to a tenth at 50% and at 75% of the epochs",
        density=0.001, epochs=164, batch_size=32, lr=0.1, warmup_epochs=4,
    )  # fmt: skip
    parser.add_argument("--data", type=Path, required=True, help="folder with data_batch_1 ... and test_batch")
    parser.add_argument("--depth", type=int, default=20, metavar="L", help="6n + 2 layers; 20 and 110 are in the paper")
    args = parser.parse_args()
    (images, labels), test = load(args.data)
    hvd.init()
    torch.manual_seed(args.seed)
    device = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    model = resnet(args.depth)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # from the host: a Horovod without CUDA can do that too
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    compression = getattr(Compression, args.compression)
    if args.compression not in common.UNCOMPRESSED:
        warmup = WarmupSchedule(epochs=args.warmup_epochs) if args.warmup_epochs else None
        compression = compression(**common.fields(args), warmup=warmup)
    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    sampler = DistributedSampler(labels, hvd.size(), hvd.rank(), seed=args.seed)
    draw = torch.Generator().manual_seed(1000 * args.seed + hvd.rank())
    progress, start, step = common.Progress(args.epochs, hvd.rank()), time.perf_counter(), 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # the warm-up hears it too
        for chosen in torch.tensor(list(sampler)).split(args.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, epoch, step)
            optimizer.zero_grad()
            loss = cross_entropy(model(prepared(images[chosen], draw).to(device)), labels[chosen].to(device))
            loss.backward()
            optimizer.step()
            step += 1
        progress.advance(loss.item())
    seconds = time.perf_counter() - start
    numel = sum(p.numel() for p in model.parameters())
    sent = common.traffic(optimizer, numel, args.compression, step, hvd.size())
    quality = accuracy(model, *test, device)
    if hvd.rank() == 0:
        common.report(args, "accuracy", quality, seconds, sent)


if __name__ == "__main__":
    main()
