"""A script for torchrun as users of DDP write them: it knows nothing of dgc_horovod.

torchrun --nproc-per-node 2 examples/unmodified_ddp.py
dgcrun --dgc --density 0.01 torchrun --nproc-per-node 2 examples/unmodified_ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from digits import accuracy, digits, make_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Train a small convolutional net on scikit-learn's digits.")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)


def main() -> None:
    """Train on all ranks and report from rank 0."""
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, args.epochs // 2), gamma=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        scheduler.step()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy(model.module, test):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
