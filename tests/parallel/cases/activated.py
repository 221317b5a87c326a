"""Scripts that know Horovod only, in ranks with the activation on PYTHONPATH."""

from __future__ import annotations

import inspect
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import join
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dgc_horovod.testing.torch import session
from tests.helpers.logs import messages
from tests.helpers.loss_scaling import found_in_scripts
from tests.helpers.training import UNROUNDED, batches, fingerprint, smooth_model


def _train(scaled: bool, others: bool = False) -> tuple[nn.Module, Any]:
    """SGD with a loss scale, as in Horovod's own example; `others`: a second scaler for a second model in between."""
    model, second = smooth_model(), smooth_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled, growth_interval=7)
    other = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9), m.named_parameters())
        for m in ([model, second] if others else [model])
    ]
    for x, y in batches(20, hvd.rank()):
        for m, optimizer, loss_scale in zip([model, second], optimizers, [scaler, other], strict=False):
            optimizer.zero_grad()
            loss_scale.scale(F.mse_loss(m(x), y)).backward()
            optimizer.synchronize()
            loss_scale.unscale_(optimizer)
            with optimizer.skip_synchronize():
                loss_scale.step(optimizer)
            loss_scale.update()
    return model, optimizers[0]


def loss_scale_is_seen() -> dict[str, Any]:
    """The same bits with and without a GradScaler that nobody has told us of, also with a second one in between."""
    hvd.init()
    plain, optimizer = _train(False)
    stats = optimizer.compression_stats()
    return {
        "same bits": fingerprint(plain) == fingerprint(_train(True)[0]) == fingerprint(_train(True, others=True)[0]),
        "density": stats["selected"] / stats["elements"],
    }


def each_optimizer_has_its_scaler() -> dict[str, Any]:
    """An optimizer in fp32 beside one with a loss scale, in either order: the bits of each alone."""
    hvd.init()

    def run(kinds: str) -> dict[str, str]:
        models = {kind: smooth_model() for kind in kinds}
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        optimizers = {
            kind: hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9), m.named_parameters())
            for kind, m in models.items()
        }
        for x, y in batches(20, hvd.rank()):
            for kind, m in models.items():
                optimizers[kind].zero_grad()
                loss = F.mse_loss(m(x), y)
                if kind == "p":
                    loss.backward()
                    optimizers[kind].step()
                    continue
                scaler.scale(loss).backward()
                optimizers[kind].synchronize()
                with optimizers[kind].skip_synchronize():
                    scaler.step(optimizers[kind])
                scaler.update()
        return {kind: fingerprint(m) for kind, m in models.items()}

    alone = {**run("p"), **run("s")}
    return {"fp32 first": run("ps") == alone, "scaled first": run("sp") == alone}


def scaled_now_and_then() -> dict[str, list[float]]:
    """Losses some of which a GradScaler has scaled, beside stock Horovod."""
    from dgc_horovod.torch import Compression

    hvd.init()
    stock = inspect.unwrap(hvd.DistributedOptimizer)

    def wrap(model: nn.Module, alone: bool) -> tuple[nn.Module, Any]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        names = [(f"{len(wrapped)}.{name}", p) for name, p in model.named_parameters()]
        everything = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
        made = stock(sgd, names) if alone else hvd.DistributedOptimizer(sgd, names, everything)
        wrapped.append(made)
        return model, made

    wrapped: list[Any] = []
    return found_in_scripts(wrap, hvd.rank())


def own_choice_is_kept() -> dict[str, Any]:
    """A script that has chosen one of ours keeps it, and is told so."""
    from dgc_horovod.torch import Compression

    hvd.init()
    model = smooth_model()
    with messages() as texts:
        for _ in range(2):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), Compression.topk(0.5)
            )
    told = sum("chooses its compression" in text for text in texts)
    return {"density": session(optimizer).exchange.config.density, "told": told}


def adam_is_told() -> dict[str, Any]:
    """One notice that the mathematics changes."""
    hvd.init()
    model = smooth_model()
    with messages() as texts:
        hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        hvd.DistributedOptimizer(torch.optim.RMSprop(model.parameters()), model.named_parameters())
    others = [text for text in texts if "RMSprop" in text]
    return {"told": sum("beta1 = 0" in text for text in texts), "others": others}


def sparse_gradients() -> dict[str, Any]:
    """A script with sparse gradients, which Horovod gathers, and which says nothing of them."""
    hvd.init()

    def run(kind: Any, **arguments: Any) -> str:
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(200, 16, sparse=True, mode="sum")
        optimizer = hvd.DistributedOptimizer(kind(bag.parameters(), lr=0.05), bag.named_parameters(), **arguments)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(5):
            optimizer.zero_grad()
            bag(torch.randint(0, 200, (8, 5), generator=generator)).pow(2).mean().backward()
            optimizer.step()
        return fingerprint(bag)

    silent, stated = run(torch.optim.SGD), run(torch.optim.SGD, sparse_as_dense=True)
    adam = run(torch.optim.SparseAdam, sparse_as_dense=False)
    return {"same bits": silent == stated, "replicas": len(set(hvd.allgather_object(adam))) == 1}


def after_another_init() -> dict[str, Any]:
    """Horovod shut down and initialised again, and initialised twice: everything still in its place."""
    hvd.init()
    if not hvd.mpi_enabled():  # MPI cannot begin again
        hvd.shutdown()
        hvd.init()
    hvd.init()
    model = smooth_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return {"compresses": hasattr(optimizer, "compression_stats"), "size": hvd.size()}


def uneven_data() -> dict[str, Any]:
    """The script's own ``join``, with and without a loss scale that only the rank with more batches sees grow."""
    hvd.init()
    found = {}
    for scaled in (False, True):
        model = smooth_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaled, growth_interval=4)
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        for _ in range(2):
            for x, y in batches(3 + 3 * hvd.rank(), hvd.rank()):
                optimizer.zero_grad()
                scaler.scale(F.mse_loss(model(x), y)).backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
            last = join()
        found[str(scaled)] = [last, fingerprint(model), scaler.get_scale(), optimizer.compression_stats()["steps"]]
    return found


def stock_stays_reachable() -> dict[str, Any]:
    """``none`` and the functions of Horovod that nobody replaced work as before."""
    hvd.init()
    stock = inspect.unwrap(hvd.DistributedOptimizer)
    model = smooth_model()
    optimizer = stock(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return {
        "stock": not hasattr(optimizer, "compression_stats"),
        "sum": hvd.allreduce(torch.ones(1), op=hvd.Sum).item(),
    }
