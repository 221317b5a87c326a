"""Jobs of accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.integrations.training import EPOCHS, Run, Trained, digit_loss, digits, ended, small_net


def prepared(run: Run) -> Trained:
    """``prepare(everything)``, SGD with momentum."""
    net = small_net()
    return _train(run, net, torch.optim.SGD(net.parameters(), 0.1, 0.9), passes=1)


def accumulated(run: Run) -> Trained:
    """``accumulate``, clipping, AdamW."""
    net = small_net()
    return _train(run, net, torch.optim.AdamW(net.parameters(), 3e-3), passes=2)


def _train(run: Run, net: torch.nn.Module, made: torch.optim.Optimizer, passes: int) -> Trained:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes)
    data = DataLoader(digits()[0], 16)
    planned = torch.optim.lr_scheduler.CosineAnnealingLR(made, EPOCHS * len(data))
    model, optimizer, loader, schedule = accelerator.prepare(net, made, data, planned)
    if run.compression is not None:
        from dgc_horovod.torch.integrations.accelerate import compress

        compress(accelerator, model, optimizer, run.compression)
    if run.resumes:
        accelerator.load_state(str(run.folder))
    for epoch in range(EPOCHS // 2 if run.resumes else 0, EPOCHS):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(images), labels))
                if accelerator.sync_gradients and passes > 1 and run.usual:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if run.saves and epoch + 1 == EPOCHS // 2:
            accelerator.save_state(str(run.folder))
    return ended(net, made, digit_loss(net))
