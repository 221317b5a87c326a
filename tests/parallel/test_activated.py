"""What a job with the activation on PYTHONPATH does to scripts that know Horovod only."""

from __future__ import annotations

import inspect
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import join
from torch import nn

from dgc_horovod.launch.site import FOLDER
from dgc_horovod.testing.torch import session
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.loss_scaling import found_in_scripts
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import step
from tests.helpers.together import call_each
from tests.helpers.training import UNROUNDED, batches, fingerprint, smooth_model

pytestmark = pytest.mark.parallel
SETTINGS = {
    "PYTHONPATH": FOLDER,
    "DGC_COMPRESSION": "dgc",
    "DGC_DENSITY": "0.05",
    "DGC_COMPRESS_1D": "on",
    "DGC_MIN_NUMEL": "1",
}


def _made(model: nn.Module, *given: Any, lr: float = 0.02) -> Any:
    """As a script has it, that knows nothing of ours."""
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), *given)


def _train(scaled: bool, others: bool = False) -> tuple[nn.Module, Any]:
    """SGD with a loss scale; `others`: a second scaler for a second model in between."""
    models = [smooth_model(), smooth_model()][: 1 + others]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled, growth_interval=7)]
    scalers += [torch.amp.GradScaler("cpu", init_scale=64.0)]
    optimizers = [_made(model) for model in models]
    for batch in batches(20, hvd.rank()):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=False):
            step(model, optimizer, *batch, scaler, between=lambda: scaler.unscale_(optimizer))  # noqa: B023
    return models[0], optimizers[0]


def the_loss_scale_is_seen_without_an_edit() -> None:
    """The same bits with and without a GradScaler that nobody has told us of, also with a second one in between."""
    plain, optimizer = _train(False)
    stats = optimizer.compression_stats()
    assert fingerprint(plain) == fingerprint(_train(True)[0]) == fingerprint(_train(True, others=True)[0])
    assert 0.04 < stats["selected"] / stats["elements"] < 0.06


def a_gradient_that_no_scaler_has_scaled_is_taken_as_it_is() -> None:
    """It was divided by the scale of a scaler that had been in use before, or beside it: weights exploded."""
    from dgc_horovod.torch import Compression

    stock, wrapped = inspect.unwrap(hvd.DistributedOptimizer), list[Any]()

    def wrap(model: nn.Module, alone: bool) -> tuple[nn.Module, Any]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        names = [(f"{len(wrapped)}.{name}", p) for name, p in model.named_parameters()]
        everything = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
        wrapped.append(stock(sgd, names) if alone else hvd.DistributedOptimizer(sgd, names, everything))
        return model, wrapped[-1]

    for name, (from_stock, from_beginning) in found_in_scripts(wrap, hvd.rank()).items():
        assert from_stock < 1e-5 and from_beginning > 0.01, name


def a_choice_among_ours_is_the_scripts() -> None:
    """Which is told so."""
    from dgc_horovod.torch import Compression

    model = smooth_model()
    with messages() as texts:
        optimizers = [_made(model, Compression.topk(0.5)) for _ in range(2)]
    assert session(optimizers[-1]).exchange.config.density == 0.5
    assert sum("chooses its compression" in text for text in texts) == (hvd.rank() == 0)


def adam_and_others_are_told_once_on_rank_0() -> None:
    """Adam that the mathematics changes. Every rank said the other, before it knew whether anything is compressed."""
    model = smooth_model()
    with messages() as texts:
        hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        hvd.DistributedOptimizer(torch.optim.RMSprop(model.parameters()), model.named_parameters())
    assert sum("beta1 = 0" in text for text in texts) == (hvd.rank() == 0)
    others = [text for text in texts if "RMSprop" in text]
    assert len(others) == (hvd.rank() == 0) and all("plain error feedback" in text for text in others)


def sparse_gradients_need_no_word_of_the_script() -> None:
    """Horovod gathers them."""

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

    assert run(torch.optim.SGD) == run(torch.optim.SGD, sparse_as_dense=True)
    same_on_ranks(run(torch.optim.SparseAdam, sparse_as_dense=False))


def horovod_may_be_initialised_again() -> None:
    """Shut down and initialised again, and initialised twice: everything is still in its place."""
    if not hvd.mpi_enabled():  # MPI cannot begin again
        hvd.shutdown()
        hvd.init()
    hvd.init()
    assert hasattr(_made(smooth_model()), "compression_stats") and hvd.size() == 2


def uneven_data_without_an_edit() -> None:
    """The script's own ``join``, with and without a loss scale that only the rank with more batches sees grow."""
    for scaled in (False, True):
        model = smooth_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaled, growth_interval=4)
        optimizer = _made(model)
        for _ in range(2):
            for batch in batches(3 + 3 * hvd.rank(), hvd.rank()):
                step(model, optimizer, *batch, scaler, between=lambda: None)
            last = join()
        assert optimizer.compression_stats()["steps"] == 12
        assert scaler.get_scale() > 16 if scaled else (last, scaler.get_scale()) == (1, 1.0)
        same_on_ranks(last, fingerprint(model), scaler.get_scale())


def an_op_that_compression_does_not_have_is_refused_in_words_for_dgcrun() -> None:
    """They said how to edit the script."""
    model = smooth_model()
    sgd = torch.optim.SGD(model.parameters(), lr=1)
    error = error_of(lambda: hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum))
    assert "--compression none" in error


def stock_stays_reachable() -> None:
    """``none`` and the functions of Horovod that nobody replaced work as before."""
    model = smooth_model()
    stock = inspect.unwrap(hvd.DistributedOptimizer)
    optimizer = stock(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not hasattr(optimizer, "compression_stats") and hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


@pytest.mark.on_ranks(2, environment=SETTINGS, fresh=True)
@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_scripts_that_know_horovod_only(controller):
    hvd.init()
    call_each(
        the_loss_scale_is_seen_without_an_edit,
        a_gradient_that_no_scaler_has_scaled_is_taken_as_it_is,
        a_choice_among_ours_is_the_scripts,
        adam_and_others_are_told_once_on_rank_0,
        sparse_gradients_need_no_word_of_the_script,
        horovod_may_be_initialised_again,
        uneven_data_without_an_edit,
        an_op_that_compression_does_not_have_is_refused_in_words_for_dgcrun,
        stock_stays_reachable,
    )
