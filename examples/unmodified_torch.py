"""A PyTorch script as users of Horovod write them: it knows nothing of dgc_horovod.

    horovodrun -np 2 python examples/unmodified_torch.py
    dgcrun -np 2 --dgc --density 0.01 python examples/unmodified_torch.py

SGD with Nesterov momentum, fp16 allreduce, StepLR, DistributedSampler, several backward passes a step, and clipping
between ``synchronize()`` and ``step()``. scikit-learn's digits: 1,797 images of 8x8.
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TEST_IMAGES = 597

parser = argparse.ArgumentParser(description="Train a small convolutional net on digits.")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=16, help="images of one backward pass")
parser.add_argument("--batches-per-allreduce", type=int, default=2, help="backward passes before one exchange")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true", help="exchange gradients as fp16")
parser.add_argument("--clip", type=float, help="L2 norm to clip the averaged gradient at")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", help="every rank writes its weights to SAVE.RANK")


def digits():
    """The images for training and those for testing: the same split in every run."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2018))
    images, labels = images[order] - images.mean(), torch.tensor(data.target)[order]
    return (
        TensorDataset(images[TEST_IMAGES:], labels[TEST_IMAGES:]),
        TensorDataset(images[:TEST_IMAGES], labels[:TEST_IMAGES]),
    )


def make_model():
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def main():
    """Train on all ranks and report from rank 0."""
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = digits()
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    passes = args.batches_per_allreduce

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=passes,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, args.epochs // 2), gamma=0.1)

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        batches = list(loader)
        for first in range(0, len(batches) - passes + 1, passes):
            optimizer.zero_grad()
            for images, labels in batches[first : first + passes]:
                loss = cross_entropy(model(images), labels) / passes
                loss.backward()
            if args.clip:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        scheduler.step()

    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    accuracy = hvd.allreduce(accuracy, name="accuracy").item()
    if args.save:
        torch.save(model.state_dict(), f"{args.save}.{hvd.rank()}")
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
