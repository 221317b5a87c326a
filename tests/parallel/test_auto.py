"""Compression.auto on real ranks: the framework's own bits, switches that lose nothing, one choice for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from dgc_horovod.planning.trial import COMPRESSED, DENSE, GAIN, MOST_TIMED, SETTLING, TIMED
from dgc_horovod.state.residual_state import EARLIER_FP16
from tests.helpers.adapters import Adapter, Compression, on_adapters
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import UNROUNDED, distance

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_adapter = on_adapters("Horovod", slow=("DDP", "Keras"))
STEPS = 24
ORDER = (DENSE, COMPRESSED, DENSE, COMPRESSED, COMPRESSED, DENSE)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "AdamW": {"name": "AdamW", "weight_decay": 0.01, "betas": (0.9, 0.9)},
    "RMSprop": {"name": "RMSprop"},
}
VIEWS = {"gradient_as_bucket_view": True}  # of DDP
each_optimizer = pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])


def started(
    adapter: Adapter, optimizer: str = "SGD", mode: str | None = DENSE, wrap: Any = None, seed: int = 0,
    more: Mapping[str, Any] = MappingProxyType({}), **fields: Any,
) -> Any:  # fmt: skip
    """A run whose exchange stays what it is until it is told; mode None: it chooses; `more`: of the optimizer."""
    compression = Compression.auto(**{"density": 0.05, "min_numel": 16, **fields})
    run = adapter.start(compression, wrap=wrap, seed=seed, **{**OPTIMIZERS[optimizer], **more})
    if mode is not None:
        run.take(mode)
    return run


def stock(adapter: Adapter, optimizer: str = "SGD", clip: float | None = None, **more: Any) -> Any:
    """What `STEPS` steps of the framework alone make."""
    run = adapter.start(None, **{**OPTIMIZERS[optimizer], **more})
    run.clip = clip
    run.train(STEPS)
    return run


@each_adapter
@each_optimizer
def test_dense_steps_are_those_of_the_framework_bit_by_bit(adapter, optimizer):
    run = started(adapter, optimizer)
    run.train(STEPS)
    assert run.print == stock(adapter, optimizer).print


@on_adapters("Horovod", slow=("DDP",))
def test_clipped_dense_steps_are_those_of_the_framework_bit_by_bit(adapter):
    run = started(adapter, wrap=VIEWS if adapter.name == "DDP" else None, clip_norm=0.5)
    run.train(STEPS)
    assert run.print == stock(adapter, clip=0.5).print


def _train_with(run: Any, modes: Sequence[str]) -> Iterable[str]:
    """`STEPS` steps, a mode after the other; fingerprints after each."""
    for step in range(STEPS):
        run.take(modes[step * len(modes) // STEPS])
        run.step()
        yield run.print


@each_adapter
@pytest.mark.parametrize(("optimizer", "modes"), [("SGD", ORDER), ("AdamW", [DENSE])], ids=["SGD", "AdamW"])
def test_a_switch_changes_nothing_at_density_1(adapter, optimizer, modes):
    run = started(adapter, optimizer, density=1.0, factor_masking=False, **UNROUNDED)
    list(_train_with(run, modes))
    assert distance(stock(adapter, optimizer).weights, run.weights) <= 1e-5


@pytest.mark.parametrize(
    ("adapter", "optimizer", "views"),
    [
        *((Adapter("Horovod"), name, False) for name in ("SGD", "AdamW")),
        *(
            pytest.param(Adapter("DDP"), name, views, marks=pytest.mark.slow)
            for name, views in itertools.product(("SGD", "AdamW"), (False, True))
        ),
        *(pytest.param(Adapter("Keras"), name, False, marks=pytest.mark.slow) for name in OPTIMIZERS),
    ],
)
def test_replicas_are_identical_after_every_step_of_every_switch(adapter, optimizer, views):
    run = started(adapter, optimizer, wrap=VIEWS if views else None)
    prints = list(_train_with(run, ORDER))
    assert len(set(prints)) == len(prints) and np.isfinite(run.weights).all()
    assert run.left() == 0, "dense steps leave nothing behind"
    same_on_ranks(prints)


@on_adapters("Horovod", slow=("Keras",))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_all_that_was_accumulated_is_applied_once_steps_are_dense_again(adapter, momentum):
    """Gradients that do not depend on the weights: whatever the order of exchanges, all of them arrive in the end."""
    ends = []
    for modes in ([DENSE], [COMPRESSED, DENSE, COMPRESSED, DENSE]):
        compression = Compression.auto(density=0.05, min_numel=16, factor_masking=False, **UNROUNDED)
        run = adapter.start(compression, "SGD", lr=0.01, momentum=momentum)
        before, draws = run.weights, np.random.default_rng(adapter.rank)
        for step in range(STEPS):
            run.take(modes[step * len(modes) // STEPS])
            run.apply([draws.standard_normal(array.shape).astype(np.float32) for array in run.arrays])
        ends.append(run.weights - before)
    assert distance(*ends) <= 1e-6


@each_adapter
def test_every_rank_comes_to_the_choice_that_the_clock_says(adapter):
    modes: list[str] = []
    with messages() as said:
        run = started(adapter, mode=None, density=0.01)
        for _ in range(4 * (SETTLING + MOST_TIMED)):
            mode = run.choice.mode
            run.step()
            modes.append(run.session.exchange.steps.counts.mode if adapter.name == "Keras" else mode)
            same_on_ranks(run.print)
    choice = run.choice
    assert choice.ended and run.exchanged == run.optimizer.compression_stats()["steps"] == len(modes)
    assert modes[: SETTLING + TIMED] == [DENSE] * (SETTLING + TIMED)
    changes = {mode for mode, _ in itertools.groupby(modes)}
    assert changes <= set(choice.seconds) and (adapter.name == "Keras" or changes == set(choice.seconds))
    best = min(choice.seconds, key=choice.seconds.get)
    assert choice.mode == modes[-1] == (best if choice.seconds[best] <= GAIN * choice.seconds[DENSE] else DENSE)
    if adapter.name == "DDP":
        assert adapter.rank or any("DDP " in text for text in said)
    same_on_ranks(modes, choice.seconds)


DAMPED: dict[str, Any] = {"name": "SGD", "momentum": 0.9, "dampening": 0.1}  # torch alone has it


@on_adapters("Horovod", "DDP")
def test_what_cannot_be_compressed_is_left_to_the_framework_with_its_limit(adapter):
    ends = []
    for compression, clip in (
        (None, None), (None, 0.5), (Compression.auto(), None), (Compression.auto(clip_norm=0.5), None)
    ):  # fmt: skip
        run = adapter.start(compression, **DAMPED)
        run.clip = clip
        run.train(STEPS)
        assert not hasattr(run.optimizer, "compression_stats")
        ends.append(run.weights)
    assert distance(ends[0], ends[2]) < 1e-6 and distance(ends[1], ends[3]) < 1e-6 < 1e-4 < distance(ends[0], ends[3])
    same_on_ranks(run.print)


@pytest.mark.parametrize("residuals", ["ignored", "if sound"])
@pytest.mark.parametrize(
    ("optimizer", "mode", "ended"),
    [("SGD", DENSE, True), ("SGD", COMPRESSED, True), *((name, COMPRESSED, False) for name in OPTIMIZERS)],
)
@on_adapters("Horovod", slow=("Keras",))
def test_a_job_that_has_lost_residuals_does_the_same_on_every_rank(
    adapter, optimizer, mode, ended, residuals, tmp_path
):
    """It goes on with what was chosen; where nothing was, the choice is made again."""
    run = started(adapter, optimizer, density=0.1)
    run.train(4)
    run.take(mode)
    run.train(4)
    run.choice.ended = ended
    run.save(tmp_path)
    adapter.barrier()
    if adapter.rank == 0:
        next(tmp_path.glob("*rank1.npz")).write_bytes(b"")
    adapter.barrier()
    run = started(adapter, optimizer, mode=None, density=0.1)
    run.load(tmp_path, residuals=residuals)
    assert (run.choice.mode, run.choice.ended) == (mode if ended else DENSE, ended)
    for _ in range(3):
        run.step()
        same_on_ranks(run.print)


@pytest.mark.parametrize("mode", [DENSE, EARLIER_FP16, COMPRESSED])
@each_adapter
@each_optimizer
def test_a_resumed_run_is_the_uninterrupted_one_in_each_state(adapter, optimizer, mode, tmp_path):
    ends = []
    for stops in (False, True):
        run = started(adapter, optimizer)
        run.train(STEPS // 3)
        run.take(DENSE if mode == EARLIER_FP16 else mode)
        run.train(STEPS // 3)
        if stops:
            run.choice.stay(mode)  # what earlier versions wrote where fp16 was chosen
            run.save(tmp_path)
            run = started(adapter, optimizer, mode=None)
            run.load(tmp_path)
            run.steps = 2 * STEPS // 3
        run.train(STEPS // 3)
        ends.append(run.print)
    assert ends[0] == ends[1] and run.choice.mode == (COMPRESSED if mode == COMPRESSED else DENSE)
    same_on_ranks(ends[1])


@pytest.mark.slow
@pytest.mark.on_ranks(4, fresh=True)  # it declares process sets
@on_adapters("Horovod", "Keras")
@each_optimizer
def test_workers_of_nodes_switch_alike(adapter, optimizer):
    """They keep slices: switches are the same for all of them, and lose nothing."""
    if adapter.name == "Keras":
        from dgc_horovod.tensorflow import node_process_sets
    else:
        from dgc_horovod.torch import node_process_sets
    adapter.ranks.init(process_sets=node_process_sets(2))
    run = started(adapter, optimizer, exchange="hierarchical", node_size=2)
    prints = list(_train_with(run, ORDER))
    assert len(set(prints)) == len(prints) and run.left() == 0 and np.isfinite(run.weights).all()
    same_on_ranks(prints)
