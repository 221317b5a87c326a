"""Packets that are checked on a device: the host's errors in its words, one launch a bucket, and one wait a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")

from dgc_horovod import DGCConfig
from dgc_horovod.errors import CorruptPacket, DGCError
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.exchange.flat import AllgatherExchange
from dgc_horovod.kernels.contract import MomentumCorrection
from dgc_horovod.kernels.reference import ReferenceKernels
from dgc_horovod.kernels.triton import memory, receiver
from dgc_horovod.kernels.triton.kernels import TritonKernels
from dgc_horovod.testing.loopback import Board, Loopback
from dgc_horovod.torch.gradients.collectives import ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.wire.bucket import Bucket, Segment
from dgc_horovod.wire.packet import FLAG_CLIPS, FLAG_JOINED, FLAG_NONFINITE, FLAG_OVERFLOW, HEADER, PacketFormat
from tests.helpers.data import as_array, as_numpy
from tests.helpers.packets import NATIVE, random_elements, seal, write

NUMEL, STEP, RANKS = 600, 7, 3
BUCKET, WIRE = Bucket(3, (Segment("w", 0, NUMEL),)), PacketFormat(3, NUMEL, 20, "bf16")
DEVICE, HOST = TritonKernels("cpu"), ReferenceKernels()


def packets_of(flags=(0,) * RANKS):
    return [write(NATIVE, WIRE, *random_elements(WIRE, 11, rank), STEP, flags[rank])[0] for rank in range(RANKS)]


def read_by(kernels, packets):
    """What the exchange makes of all ranks' packets: the update and the outcome, or the error."""
    exchange, outputs = AllgatherExchange(BUCKET, WIRE, kernels, RANKS), kernels.outputs(BUCKET)
    output = as_array(kernels, np.full(NUMEL, np.nan, np.float32))
    outputs.put(0, output)
    try:
        exchange.proceed(0, np.concatenate(packets), STEP)
        exchange.aggregate_into(outputs, 0.5)
        finite = exchange.settle()
    except DGCError as error:
        return type(error), str(error)
    return finite, exchange.outcome, as_numpy(kernels, output).tobytes()


@pytest.mark.parametrize("sealed", [False, True], ids=["as it came", "sealed again"])
@pytest.mark.parametrize("field", HEADER.names)
def test_a_wrong_header_is_the_error_of_the_host(field, sealed):
    most = np.iinfo(HEADER[field]).max
    for change in (1, most // 2 + 1) if sealed else (most,):
        packets = packets_of()
        packets[1][: HEADER.itemsize].view(HEADER)[field] ^= HEADER[field].type(change)
        if sealed:
            seal(packets[1])
        ours, theirs = read_by(DEVICE, packets), read_by(HOST, packets)
        assert ours == theirs
        assert "rank 1" in str(theirs[1]) or (sealed and (field, change) in (("checksum", change), ("flags", 1)))


def test_the_first_of_several_errors_is_that_of_the_host():
    packets = packets_of()
    packets[0][: HEADER.itemsize].view(HEADER)["step"] = STEP + 1
    seal(packets[0])
    packets[2][-1] ^= 1
    assert read_by(DEVICE, packets) == read_by(HOST, packets)
    assert "rank 2 is damaged" in read_by(DEVICE, packets)[1]


@pytest.mark.parametrize("flag", [0, FLAG_NONFINITE, FLAG_JOINED, FLAG_CLIPS, FLAG_OVERFLOW, FLAG_JOINED | FLAG_CLIPS])
def test_flags_make_the_outcome_of_the_host(flag):
    packets = packets_of((flag, 0, flag))
    ours, theirs = read_by(DEVICE, packets), read_by(HOST, packets)
    assert ours == theirs and theirs[0] is True


def test_packets_in_pinned_memory_are_copied_from_there(monkeypatch):
    monkeypatch.setattr(receiver, "is_pinned", lambda packets: True)
    assert read_by(DEVICE, packets_of()) == read_by(HOST, packets_of())


class Network(Loopback):
    """A loopback; while `damages` is set, one bit of the packets of bucket 1 flips on the way."""

    damages = False

    def _result(self, pending):
        result = super()._result(pending)
        if self.damages and pending.handle is self._board["bucket1.packets"]:
            result[-1] ^= 1
        return result


def ranks_of_one_process(kernels, monkeypatch):
    """Two ranks of three buckets on `kernels`."""
    monkeypatch.setattr("dgc_horovod.kernels.registry.choose", lambda device: kernels)
    config, board, ranks = DGCConfig(density=0.02, min_numel=16, bucket_bytes=4 * 2500, warmup=None), Board(), []
    for rank in range(2):
        draw = torch.Generator().manual_seed(0)
        parameters = {f"p{i}": torch.nn.Parameter(torch.randn(40, 50, generator=draw)) for i in range(3)}
        ranks.append(
            GradientExchange(
                parameters, dict.fromkeys(parameters.values(), 0), config, {ALL: Network(rank, 2, board)},
                ReduceSettings(averages=True), lambda: 1.0,
            )
        )  # fmt: skip
    assert [len(each.engines) for each in ranks] == [3, 3]
    return ranks, board


def sent(ranks, step):
    """Functions that return the updates, by rank, after both ranks have sent the gradients of a step."""
    results = []
    for rank, each in enumerate(ranks):
        draw = torch.Generator().manual_seed(2 * step + rank)
        each.begin_step(dict.fromkeys(each.numel, MomentumCorrection(0.9)), {})
        for p in each.names:
            p.grad = torch.randn(p.shape, generator=draw)
        results.append([each.take(p) for p in each.names])
        each.share_second()
    return results


def test_a_step_of_many_buckets_is_waited_for_once(monkeypatch):
    ranks, board = ranks_of_one_process(DEVICE, monkeypatch)
    others, other_board = ranks_of_one_process(HOST, monkeypatch)
    waits, launches, launch = [], [], memory.Recorded.launch
    for step in range(2):
        results, others_results = sent(ranks, step), sent(others, step)
        monkeypatch.setattr(memory, "_wait_for_stream", waits.append)
        monkeypatch.setattr(memory.Recorded, "launch", lambda *given: launches.append(1) or launch(*given))
        for own, other in zip(results, others_results, strict=True):
            waits.clear()
            launches.clear()
            updates = [result() for result in own]
            assert len(waits) == 1 and len(launches) == 3
            assert [u.numpy().tobytes() for u in updates] == [result().numpy().tobytes() for result in other]
        monkeypatch.undo()
        for each in (*ranks, *others):
            assert each.finish()
        board.clear()
        other_board.clear()


def test_a_damaged_packet_is_one_error_and_changes_nothing(monkeypatch):
    found = []
    for kernels in (DEVICE, HOST):
        ranks, board = ranks_of_one_process(kernels, monkeypatch)
        for step in range(2):
            results = sent(ranks, step)
            for each in ranks:
                each.collectives.damages = step == 0
            for own, each in zip(results, ranks, strict=True):
                if step == 0:
                    with pytest.raises(CorruptPacket) as error:
                        [result() for result in own]
                    found.append(str(error.value))
                    each.abandon()
                else:
                    found += [result().numpy().tobytes() for result in own]
                    assert each.finish()
            board.clear()
        states = [arrays for each in ranks for arrays in each.state_arrays().values()]
        found += [array.tobytes() for arrays in states for array in arrays.values()]
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert "bucket 1: the packet of rank 1 is damaged" in found[0] and found[0] == found[1]
