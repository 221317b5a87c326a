"""One rank of `benchmarks.nodes`: a flat exchange and others in turn; writes its figures to a file."""

from __future__ import annotations

import gc
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks import connections
from benchmarks.exchange.gradients import Gradients
from benchmarks.exchange.methods import CompressedMethod, HorovodMethod, Method
from benchmarks.exchange.worker import Clock, Order, bytes_out
from benchmarks.shapes import SHAPES, Shapes
from dgc_horovod.config import FLAT, HIERARCHICAL, SHARDED
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, node_process_sets

NOTHING, DENSE = "no exchange", "dense"
METHODS = (NOTHING, DENSE, FLAT, SHARDED, HIERARCHICAL, f"{HIERARCHICAL}+{SHARDED}")


def make(name: str, shapes: Shapes, density: float) -> Method:
    """The method of that name."""
    if name == NOTHING:
        return Method(shapes)
    if name == DENSE:
        return HorovodMethod(shapes, Compression.none)
    return CompressedMethod(shapes, Compression.dgc(density=density, exchange=name))


def measure(name: str, order: Order, gradients: Gradients) -> dict[str, Any]:
    """The figures of one method on this rank."""
    method = make(name, SHAPES[order.model](), order.density)
    clock = Clock(method, gradients, hvd.rank())
    clock.run(1 + max(order.warm_up, method.untimed))
    replicas = same_bits(method)
    clock.forget()
    sent = bytes_out(order.device)
    clock.run(order.most)
    sent = bytes_out(order.device) - sent
    found = {"ms": clock.milliseconds, "card_bytes": sent / order.most, "replicas": replicas, **kept(method)}
    found["phases_ms"] = clock.phases
    method.close()
    return found


def same_bits(method: Method) -> bool:
    """Whether every rank has the same updates, to the last bit."""
    sums = [zlib.crc32(gradient.numpy().tobytes()) for gradient in method.gradients]
    return len(set(method.gathered(float(zlib.crc32(repr(sums).encode()))))) == 1


def kept(method: Method) -> dict[str, Any]:
    """Bytes of u and v on this rank, and what the exchange is."""
    if not isinstance(method, CompressedMethod):
        return {}
    exchange = session(method.optimizer).exchange
    states = [engine.state for engine in exchange.engines]
    arrays = [x for state in states for x in (state.u, state.v, state.remainder) if x is not None]
    rounds = max((engine.exchange.rounds for engine in exchange.engines), key=len)
    return {
        "state_bytes": sum(4 * len(x) for x in arrays),
        "rounds": [f"{collective.name}, {collective.group}" for collective in rounds],
    }


def main() -> None:
    """All methods of the order, one after another, each with connections of its own."""
    order = Order.read(sys.argv[1])
    hvd.init(process_sets=node_process_sets(int(os.environ["HOROVOD_LOCAL_SIZE"])))
    torch.set_num_threads(1)
    gradients = Gradients(Path(order.folder), [shape for _, shape in SHAPES[order.model]()])
    figures = {}
    for name in order.methods:
        figures[name] = measure(name, order, gradients)
        gc.collect()  # the next one needs the memory
        connections.shut_down()
        hvd.init(process_sets=node_process_sets(int(os.environ["HOROVOD_LOCAL_SIZE"])))
    Path(order.folder, f"rank{hvd.rank()}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
