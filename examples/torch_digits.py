"""Image classification: a small convolutional net on scikit-learn's digits (1,797 images of 8x8 pixels).

    horovodrun -np 2 python examples/torch_digits.py --compression dgc

Shows the two lines that a Horovod script changes, and a density warm-up in epochs: the epoch is the one
the script tells its DistributedSampler anyway.
"""

from __future__ import annotations

import time

import common
import horovod.torch as hvd
import torch
from digits import accuracy, digits, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule


def main() -> None:
    """Train on all ranks and report from rank 0."""
    args = common.arguments(
        "A convolutional net on scikit-learn's digits, with gradient compression.",
        density=0.005,
        epochs=60,
        batch_size=32,
        lr=0.1,
        lr_warmup_epochs=2,
        warmup_epochs=3,
    ).parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train, hvd.size(), hvd.rank(), seed=args.seed
    )
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise SystemExit(f"--batch-size {args.batch_size} is too large: each rank has {len(sampler)} images")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)

    compression = getattr(Compression, args.compression)
    if args.compression not in common.UNCOMPRESSED:
        warmup = WarmupSchedule(epochs=args.warmup_epochs) if args.warmup_epochs else None
        compression = compression(**common.fields(args), warmup=warmup)
    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, common.learning_rate(args, len(loader)))
    progress, start = common.Progress(args.epochs, hvd.rank()), time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
        progress.advance(loss.item())
    seconds = time.perf_counter() - start
    numel = sum(p.numel() for p in model.parameters())
    sent = common.traffic(optimizer, numel, args.compression, args.epochs * len(loader), hvd.size())
    if hvd.rank() == 0:  # the replicas agree
        common.report(args, "accuracy", accuracy(model, test), seconds, sent)


if __name__ == "__main__":
    main()
