"""Messages that a device makes while the backward pass goes on: when the host waits, and the order of collectives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")

from dgc_horovod import DGCConfig
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.kernels.triton.kernels import TritonKernels
from dgc_horovod.kernels.triton.sender import TritonSender
from dgc_horovod.testing.loopback import Loopback
from dgc_horovod.torch.gradients.collectives import ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates import update_of

BUCKETS, SHAPE, WARM = 4, (12, 10), 3  # steps after which the device finds all candidates


class Device:
    """The clock of a device: which buckets' steps it has done. It keeps what the host has asked for."""

    def __init__(self) -> None:
        self.done: set[int] = set(range(BUCKETS))
        self.seen: list[tuple[str, int]] = []

    def of(self, what: str) -> list[int]:
        return [bucket for event, bucket in self.seen if event == what]


class Slow(TritonSender):
    """The sender, on a device whose clock a test moves."""

    def __init__(self, device: Device, bucket, *arguments) -> None:
        super().__init__(bucket, *arguments)
        self._clock, self._number = device, bucket.index

    def start(self, *arguments):
        super().start(*arguments)
        self._clock.seen.append(("start", self._number))

    @property
    def ready(self):
        return self._number in self._clock.done

    def finish(self):
        self._clock.seen.append(("take" if self.ready else "wait", self._number))
        return super().finish()


class Kernels(TritonKernels):
    def __init__(self, device: Device) -> None:
        super().__init__("cpu")
        self._clock = device

    def sender(self, bucket, wire, max_candidates):
        return Slow(self._clock, bucket, wire, max_candidates, self.device) if wire.indices != "every" else None


class Carrier(Loopback):
    """One rank alone; it keeps the names of its collectives in their order."""

    def __init__(self, by_name: bool) -> None:
        super().__init__(0, 1, {})
        self.by_name, self.names, self.copies = by_name, [], False

    def stages(self, tensor):
        return self.copies

    def _post(self, part, name, combine):
        self.names.append(name)
        return super()._post(part.clone(), name, combine)


class Rank:
    """An optimizer's exchange, whose gradients a test delivers one after another."""

    def __init__(self, by_name=True, adam=False, on_device=True, **settings) -> None:
        self.device = Device()
        kernels = Kernels(self.device) if on_device else NativeKernels()
        made = type("_Exchange", (GradientExchange,), {"_kernels_of": lambda self, p: kernels})
        shapes = {f"w{i}": SHAPE for i in reversed(range(BUCKETS))} | {"bias": (7,)}
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        common = {"density": 0.05, "min_numel": 16, "bucket_bytes": 4 * SHAPE[0] * SHAPE[1], "dense_values": "fp32"}
        config, self.carrier = DGCConfig(**{**common, **settings}), Carrier(by_name)
        places = dict.fromkeys(self.parameters.values(), 0)
        reduce = ReduceSettings(averages=True)
        self.exchange = made(self.parameters, places, config, {ALL: self.carrier}, reduce, lambda: 1.0)
        values = self.parameters.values()
        self.optimizer = torch.optim.AdamW(values, 0.1) if adam else torch.optim.SGD(values, 0.1, momentum=0.9)
        self.update = update_of(self.optimizer, config)
        self.update.prepare(self.optimizer, self.exchange)
        self.drawn = WARM
        if on_device:  # the interpreter is slow: the host makes the first steps
            self.exchange.load(Rank(by_name, adam, False, **settings).exchange.residuals())
            self.exchange.clipping.goes_on()
        else:
            self.drawn = 0
            for _ in range(WARM):
                self.step()

    def begin(self, spoils=None) -> None:
        """Draw the gradients of a step; nothing is delivered yet."""
        self.carrier._board.clear()
        self.carrier.names.clear()
        rng, self.drawn = np.random.default_rng(self.drawn), self.drawn + 1
        for name, p in self.parameters.items():
            p.grad = torch.from_numpy(rng.laplace(size=tuple(p.shape)).astype(np.float32))
            if name == spoils:
                p.grad.view(-1)[3] = float("nan")
        group, states = self.optimizer.param_groups[0], self.optimizer.state
        self.exchange.begin_step(*self.update.entering(lambda p: group, states, self.exchange))
        self.results = {}

    def deliver(self, *names: str) -> None:
        for name in names:
            self.results[name] = self.exchange.take(self.parameters[name])

    def end(self) -> bool:
        for name, result in self.results.items():
            self.parameters[name].grad = result()
        finite = self.exchange.finish()
        self.exchange.clipping.step_ends()
        return finite

    def step(self, spoils=None, done_after=None) -> bool:
        """One step; `done_after`: for each bucket the number of gradients after which the device has done it."""
        self.begin(spoils)
        for number, name in enumerate(reversed(self.parameters)):
            if done_after is not None:
                self.device.done = {bucket for bucket, after in enumerate(done_after) if after <= number}
            self.deliver(name)
        return self.end()

    @property
    def bits(self) -> bytes:
        """Everything that a step leaves behind."""
        arrays = [x for kept in self.exchange.state_arrays().values() for x in kept.values()]
        return b"".join(x.tobytes() for x in [*arrays, *(p.grad.numpy() for p in self.parameters.values())])

    @property
    def buckets_sent(self) -> list[str]:
        return [name for name in self.carrier.names if name.endswith(".packets")]


def packets(*numbers: int) -> list[str]:
    return [f"bucket{i}.packets" for i in numbers]


@pytest.mark.parametrize("by_name", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_messages_are_handed_on_in_the_order_of_launch_and_the_host_waits_only_at_the_end(by_name):
    rank = Rank(by_name)
    device, events = rank.device, rank.device.of
    rank.begin()
    device.done = set()
    rank.deliver("bias", "w0", "w1", "w2")
    assert events("start") == [0, 1, 2] and not rank.buckets_sent, "three buckets are under way, none is waited for"
    device.done = {1, 2}
    rank.exchange.hand_on()
    assert not rank.buckets_sent, "bucket 0 is the head of the line"
    device.done = {0, 1}
    rank.deliver("w3")
    assert rank.buckets_sent[:2] == packets(0, 1)
    assert rank.end() and rank.buckets_sent == packets(0, 1, 2, 3)
    assert events("take") == [0, 1] and events("wait") == [2, 3]
    assert events("start") == [0, 1, 2, 3]


def test_a_clipped_norm_launches_all_buckets_before_the_first_wait():
    rank = Rank(clip_norm=0.5)
    rank.step(done_after=[9] * BUCKETS)
    assert [event for event, _ in rank.device.seen] == ["start"] * BUCKETS + ["wait"] * BUCKETS
    assert rank.buckets_sent == packets(*range(BUCKETS))


def test_small_tensors_that_a_carrier_copies_to_the_host_do_not_hold_up_the_backward_pass():
    rank, twin = Rank(), Rank(on_device=False)
    rank.carrier.copies = True
    rank.begin()
    rank.deliver("bias", "w0", "w1", "w2", "w3")
    assert rank.carrier.names == packets(0, 1, 2, 3) and rank.exchange.is_compressing
    rank.exchange.hand_on(waits=True)
    assert rank.carrier.names[BUCKETS:] == ["dense.bias"] and not rank.exchange.is_compressing
    assert rank.end() and twin.step() and rank.bits == twin.bits
    assert rank.step() and rank.carrier.names.count("dense.bias") == 1


SPEEDS = ([0, 0, 0, 0], [9, 9, 9, 9], [4, 1, 2, 3], [2, 9, 4, 3])  # gradients until the device has done each bucket


@pytest.mark.parametrize("adam", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["SGD", "AdamW"])
def test_where_collectives_match_by_order_it_is_that_of_the_program_on_fast_and_slow_devices(adam):
    """And bits are those of a rank whose steps are made at once: on the host; for AdamW on a device, as sums differ."""
    slow, at_once = Rank(by_name=False, adam=adam), Rank(by_name=False, adam=adam, on_device=adam)
    for speed in SPEEDS:
        assert slow.step(done_after=speed) and at_once.step()
        assert slow.carrier.names == at_once.carrier.names and slow.bits == at_once.bits, speed
    assert slow.carrier.names[: BUCKETS + 1] == [*packets(*range(BUCKETS)), "dense.torch.float32"]
    assert adam == any(name.startswith("second moments") for name in slow.carrier.names[BUCKETS + 1 :])


def test_the_host_chooses_for_one_bucket_while_the_device_goes_on_with_others():
    """A gradient that is not finite: the whole step is rolled back, though later buckets were launched before."""
    slow, at_once = Rank(), Rank(on_device=False)
    for number, speed in enumerate(SPEEDS):
        finite = [rank.step(f"w{number}" if number % 2 else None, speed) for rank in (slow, at_once)]
        assert finite == [number % 2 == 0] * 2 and slow.bits == at_once.bits, speed


def test_a_step_that_is_given_up_is_waited_for_and_not_handed_on():
    found = []
    for on_device in (True, False):
        rank = Rank(on_device=on_device)
        rank.begin()
        rank.device.done = {1}
        rank.deliver("bias", "w0", "w1")
        rank.exchange.abandon()
        if on_device:
            assert rank.device.of("wait") == [0] and not rank.buckets_sent
        assert rank.step(done_after=SPEEDS[-1]) and rank.buckets_sent == packets(*range(BUCKETS))
        found.append(rank.bits)
    assert found[0] == found[1]
