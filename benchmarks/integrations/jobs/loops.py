"""Loops of torch alone, as the well-known scripts have them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.integrations import training as given
from benchmarks.integrations.training import Run, Trained

STEPS = 60


def _begin() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def imagenet(run: Run) -> Trained:
    """As torchvision's: autocast, GradScaler, ``set_epoch``, StepLR, SGD with momentum; ``save_checkpoint``."""
    _begin()
    train = given.digits()[0]
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 16, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(given.small_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if run.compression is not None:
        from dgc_horovod.torch.ddp import load_checkpoint, register, save_checkpoint

        register(model, optimizer, run.compression)
    first = 0
    if run.resumes:
        found = load_checkpoint(run.folder, model, optimizer)
        first = found["epoch"]
        schedule.load_state_dict(found["schedule"])
        scaler.load_state_dict(found["scaler"])
    for epoch in range(first, given.EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=run.usual):
                loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        if run.saves and epoch + 1 == given.EPOCHS // 2:
            more = {"schedule": schedule.state_dict(), "scaler": scaler.state_dict()}
            save_checkpoint(run.folder, model, optimizer, epoch=epoch + 1, **more)
    return given.ended(model.module, optimizer, given.digit_loss(model.module))


def mingpt(run: Run) -> Trained:
    """As minGPT: AdamW of two groups, ``no_sync``, clipping, cosine; torch.distributed.checkpoint."""
    _begin()
    net = given.SmallGPT()
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    decayed, others = ([p for p in net.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    if run.compression is not None:
        from dgc_horovod.torch.ddp import load_residuals, register, save_residuals

        register(model, optimizer, run.compression)
    half, kept = STEPS // 2, str(run.folder / "dcp")
    if run.resumes:
        weights, state = get_state_dict(net, optimizer)
        found = {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}
        dcp.load(found, checkpoint_id=kept)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
        schedule.load_state_dict(found["schedule"])
        load_residuals(run.folder / "residuals", optimizer)
    batches = given.texts(STEPS * 2 * given.RANKS * 8).view(STEPS, 2, given.RANKS, 8, -1)[:, :, dist.get_rank()]
    for step in range(half if run.resumes else 0, STEPS):
        for i, rows in enumerate(batches[step]):
            with model.no_sync() if i == 0 else contextlib.nullcontext():
                (given.byte_loss(model, rows) / 2).backward()
        if run.usual:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if run.saves and step + 1 == half:
            weights, state = get_state_dict(net, optimizer)
            dcp.save({"model": weights, "optimizer": state, "schedule": schedule.state_dict()}, checkpoint_id=kept)
            save_residuals(run.folder / "residuals", optimizer)
    with torch.no_grad():
        return given.ended(net, optimizer, float(given.byte_loss(net)))


def plain(run: Run) -> Trained:
    """Few lines, SGD with momentum; ``torch.save``, and the residuals beside it."""
    _begin()
    model = DistributedDataParallel(given.small_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    if run.compression is not None:
        from dgc_horovod.torch.ddp import load_residuals, register, save_residuals

        register(model, optimizer, run.compression)
    file = run.folder / "half.pt"
    if run.resumes:
        found = torch.load(file)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        load_residuals(run.folder / "residuals", optimizer)

    def save() -> None:
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        save_residuals(run.folder / "residuals", optimizer)  # waits for every rank

    given.train_digits(run, dist.get_rank(), model, optimizer, save)
    return given.ended(model.module, optimizer, given.digit_loss(model.module))


def spawn(body: Callable[[], None]) -> None:
    """Start the ranks as a script without a launcher does."""
    import torch.multiprocessing as mp

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(found.getsockname()[1]), WORLD_SIZE=str(given.RANKS))
    mp.spawn(_spawned, (body,), nprocs=given.RANKS)


def _spawned(index: int, body: Callable[[], None]) -> None:
    os.environ["RANK"] = str(index)
    body()


def ray(body: Callable[[], None]) -> None:
    """Start the ranks by Ray Train, which makes the process group."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(body, scaling_config=ScalingConfig(num_workers=given.RANKS)).fit()
