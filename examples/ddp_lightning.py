"""The digits with Lightning: a callback compresses the gradients of its Trainer.

    torchrun --nproc-per-node 2 examples/ddp_lightning.py

Needs Lightning (``pip install lightning``).
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from digits import accuracy, digits, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dgc_horovod.torch.ddp import Compression
from dgc_horovod.torch.integrations.lightning import CompressCallback


class Digits(lightning.LightningModule):
    """A net, its loss and its optimizer, as for training without compression."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Loss of a batch."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any torch optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def main() -> None:
    """Train on all ranks and report from the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data")
    parser.add_argument("--ranks", type=int, default=2, help="as torchrun was told")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = digits()
    model = Digits()
    callback = CompressCallback(Compression.dgc(density=0.01))
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=args.ranks, max_epochs=args.epochs, callbacks=[callback],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(train, 32, shuffle=True))
    if trainer.is_global_zero:
        stats = trainer.optimizers[0].compression_stats()
        ratio = stats["bytes_dense"] / stats["bytes_sent"]
        print(f"accuracy {accuracy(model.net, test):.1%}, {ratio:.0f}x less sent")


if __name__ == "__main__":
    main()
