"""The digits with Hugging Face's accelerate: one line after ``prepare`` compresses gradients.

    torchrun --nproc-per-node 2 examples/ddp_accelerate.py

Needs accelerate (``pip install accelerate``).
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from digits import accuracy, digits, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dgc_horovod.torch.ddp import Compression
from dgc_horovod.torch.integrations.accelerate import compress


def main() -> None:
    """Train on all ranks and report from the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = digits()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train, 32, shuffle=True))
    compress(accelerator, model, optimizer, Compression.dgc(density=0.01))

    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
    stats = optimizer.optimizer.compression_stats()
    accelerator.print(
        f"accuracy {accuracy(accelerator.unwrap_model(model), test):.1%}, "
        f"{stats['bytes_dense'] / stats['bytes_sent']:.0f}x less sent"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
