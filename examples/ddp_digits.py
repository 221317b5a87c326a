"""Image classification as in torch_digits.py, with DistributedDataParallel and without Horovod.

    torchrun --nproc-per-node 2 examples/ddp_digits.py --compression dgc

Shows the two lines that a DDP script adds: the import and ``register``. With ``--checkpoint`` the ranks save every
epoch, and go on from there when torchrun has started them again (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun
--max-restarts 3 ...``; why the variable: docs/ddp.md).
"""

from __future__ import annotations

import time
from pathlib import Path

import common
import torch
import torch.distributed as dist
from digits import accuracy, digits, make_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dgc_horovod.torch.ddp import Compression, WarmupSchedule, load_checkpoint, register, save_checkpoint


def main() -> None:
    """Train on all ranks and report from rank 0."""
    parser = common.arguments(
        "A convolutional net on scikit-learn's digits, with gradient compression in DDP.",
        density=0.005,
        epochs=60,
        batch_size=32,
        lr=0.1,
        lr_warmup_epochs=2,
        warmup_epochs=3,
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here after every epoch, and go on from it")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise SystemExit(f"--batch-size {args.batch_size} is too large: each rank has {len(sampler)} images")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)

    compression = getattr(Compression, args.compression)
    if args.compression not in common.UNCOMPRESSED:
        warmup = WarmupSchedule(epochs=args.warmup_epochs) if args.warmup_epochs else None
        compression = compression(**common.fields(args), warmup=warmup)
    register(model, optimizer, compression)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, common.learning_rate(args, len(loader)))
    first = 0
    saved = [bool(args.checkpoint) and (args.checkpoint / "manifest.json").exists()]
    dist.broadcast_object_list(saved)  # rank 0 decides: after a restart ranks may be on other hosts
    if saved[0]:
        found = load_checkpoint(args.checkpoint, model, optimizer)
        first = found["epoch"] + 1
        schedule.load_state_dict(found["schedule"])
    progress, start = common.Progress(args.epochs - first, dist.get_rank()), time.perf_counter()
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
        progress.advance(loss.item())
        if args.checkpoint:
            save_checkpoint(args.checkpoint, model, optimizer, epoch=epoch, schedule=schedule.state_dict())
    seconds = time.perf_counter() - start
    numel = sum(p.numel() for p in model.parameters())
    steps = (args.epochs - first) * len(loader)
    sent = common.traffic(optimizer, numel, args.compression, steps, dist.get_world_size())
    if dist.get_rank() == 0:  # the replicas agree
        common.report(args, "accuracy", accuracy(model.module, test), seconds, sent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
