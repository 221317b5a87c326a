"""Jobs of Lightning: its Trainer, and Fabric."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.integrations.training import EPOCHS, RANKS, Run, Trained, digit_loss, digits, ended, small_net


class _Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """Loss of a batch."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 3e-3)


def trainer(run: Run) -> Trained:
    """``strategy="ddp"``, accumulation, clipping, AdamW."""
    module, callbacks = _Digits(), list[Callback]()
    if run.saves:
        callbacks.append(ModelCheckpoint(run.folder, "{epoch}", save_top_k=-1))
    if run.compression is not None:
        from dgc_horovod.torch.integrations.lightning import CompressCallback

        callbacks.append(CompressCallback(run.compression))
    used = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=RANKS, max_epochs=EPOCHS, accumulate_grad_batches=2,
        gradient_clip_val=0.5 if run.usual else None, callbacks=callbacks, logger=False, enable_progress_bar=False,
        enable_checkpointing=run.saves, enable_model_summary=False,
    )  # fmt: skip
    saved = run.folder / f"epoch={EPOCHS // 2 - 1}.ckpt" if run.resumes else None
    used.fit(module, DataLoader(digits()[0], 16), ckpt_path=saved)
    return ended(module.net, used.optimizers[0], digit_loss(module.net))


def fabric(run: Run) -> Trained:
    """Fabric's own loop: accumulation by ``no_backward_sync``, clipping, SGD with momentum."""
    ours = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=RANKS)
    ours.launch()
    net = small_net()
    model, optimizer = ours.setup(net, torch.optim.SGD(net.parameters(), 0.1, 0.9))
    loader = ours.setup_dataloaders(DataLoader(digits()[0], 16))
    if run.compression is not None:
        from dgc_horovod.torch.ddp import register

        register(model, optimizer, run.compression)
    if run.resumes:
        ours.load(run.folder / "half.ckpt", {"model": model, "optimizer": optimizer})
        from dgc_horovod.torch.ddp import load_residuals

        load_residuals(run.folder / "residuals", optimizer)
    for epoch in range(EPOCHS // 2 if run.resumes else 0, EPOCHS):
        for i, (images, labels) in enumerate(loader):
            with ours.no_backward_sync(model, enabled=i % 2 == 0):
                ours.backward(cross_entropy(model(images), labels))
            if i % 2:
                if run.usual:
                    ours.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        if run.saves and epoch + 1 == EPOCHS // 2:
            ours.save(run.folder / "half.ckpt", {"model": model, "optimizer": optimizer})
            from dgc_horovod.torch.ddp import save_residuals

            save_residuals(run.folder / "residuals", optimizer)
    return ended(net, optimizer, digit_loss(net))
