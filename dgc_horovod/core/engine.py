"""One bucket's step: accumulate, select, encode | decode, aggregate. No framework, no communication.

The engine holds the state of this rank: the residual v and the momentum u. `BucketEngine.begin_compress` turns a
bucket's gradients into one message, which `message` waits for. The adapter runs the collectives and passes their
results to `BucketEngine.receive`. `BucketEngine.aggregate_into` then computes the update and `BucketEngine.settle`
completes it, or `BucketEngine.rollback` undoes the step. The collectives of a message are defined in `exchange`.
"""

from __future__ import annotations

import math

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucket_state import BucketState
from dgc_horovod.core.selection import ResidualView, select
from dgc_horovod.core.workspace import HostSentRecord, Message, MessageSpec, Workspace, message_spec, min_magnitude
from dgc_horovod.errors import DGCError
from dgc_horovod.exchange.contract import Exchange, Outcome, Round
from dgc_horovod.exchange.hierarchical import SlicedOutputs, Topology
from dgc_horovod.exchange.sharded import Shards
from dgc_horovod.kernels.contract import (
    NO_ELEMENTS,
    AccumulateResult,
    Accumulation,
    Array,
    Elements,
    Kernels,
    MomentumCorrection,
    Outputs,
    Sender,
    SentRecord,
    SharedMoment,
)
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import FLAG_NONFINITE


class BucketEngine:
    """State and arithmetic of one bucket on one rank.

    On a node of several workers each worker keeps a slice of the bucket: gradients, selection and state belong to the
    slice, `outputs` to the whole bucket.

    Args:
        bucket: layout of the whole bucket.
        config: compression settings, equal on all ranks.
        kernels: backend on the device that holds the gradients.
        rank: index of this worker, 0 <= rank < workers; seeds rules that draw at random.
        workers: N >= 1.
        node_size: G >= 1, number of workers of a node, which average their gradients before they are added here.

    Attributes:
        bucket: layout of this worker's slice; the whole bucket if G is 1.
        whole: layout of the whole bucket.

    Memory, for the slice: v, 4 bytes an element; u from the first step with momentum, 4 more; with shard owners 4
    for each element of a shard; about 90 bytes for each of the k selected elements (candidates, packets), and 8 for
    each received element.
    """

    def __init__(
        self, bucket: Bucket, config: DGCConfig, kernels: Kernels, rank: int, workers: int, node_size: int = 1
    ) -> None:
        self.topology = Topology(rank, workers, node_size)
        self.whole, self.config, self.kernels = bucket, config, kernels
        self.rank, self.workers = rank, workers
        slices = bucket.slices(node_size)
        self.bucket = bucket = slices[self.topology.local_rank]
        shards = Shards(bucket.numel, self.topology.nodes) if config.shards else None
        self.state = BucketState(bucket, kernels, self.topology.node, shards)
        self.gradients = kernels.gradients(bucket)
        self.outputs: Outputs = (
            kernels.outputs(bucket) if node_size == 1 else SlicedOutputs(self.whole, slices, kernels)
        )
        self._every = np.arange(bucket.numel if bucket.uncompressed else 0, dtype=np.int32)
        self._workspace: Workspace | None = None
        self._sent: SentRecord | None = None
        self._sender: Sender | None = None  # of a step that a device makes, until its message is taken
        self._message: Message | None = None  # of a step that the host has made, until it is taken
        self._step = self._round = 0
        self._has_momentum = self.adds_directions = False  # this step: momentum; directions in place of gradients
        self.flags = 0  # of messages, beside those of their content: FLAG_JOINED, FLAG_CLIPS
        self.outcome = Outcome()  # of the last step that `settle` has completed

    # -- sending

    def add_gradient(self, i: int, gradient: Array, accumulation: Accumulation) -> None:
        """Add the gradient of segment i.

        Args:
            i: index of the segment in the bucket, from 0.
            gradient: flat float32 Array, or a tensor if `Kernels.takes_tensors`; must not change before `message`.
            accumulation: form in which the gradient enters the residual.
        """
        if isinstance(accumulation, MomentumCorrection) and accumulation.momentum:
            self._has_momentum = True
            self.state.momentum()
        self.adds_directions = isinstance(accumulation, SharedMoment)
        self.gradients.put(i, gradient, accumulation)

    def compress(self, scale: float, step: int, density: float) -> Message:
        """Make one step at once: `begin_compress`, then `message`."""
        self.begin_compress(scale, step, density)
        return self.message()

    def begin_compress(self, scale: float, step: int, density: float) -> None:
        """Accumulate the added gradients, select elements, encode them, and subtract them from v.

        On a device the whole step is launched, and the host does not wait for it; otherwise it is made.

        Elements of a gradient that are not finite enter as 0. If there are any, or v overflows fp32 (u and v are then
        emptied), nothing is sent, and the message has a flag, so that every rank rolls the step back.

        Args:
            scale: factor of the gradients (clipping, loss scale), > 0.
            step: schedule step, >= 0, equal on all ranks.
            density: fraction of the elements sent at this step, in (0, 1]; not used for an uncompressed bucket.

        Cost: one pass over the bucket (`Kernels.accumulate`), and one more read if the predicted threshold is too high.
        """
        assert self._sender is None and self._message is None, "message() of the step before comes first"
        workspace = self._workspace_for(1.0 if self.bucket.uncompressed else density)
        self._step, self._round = step, 0
        if self._has_momentum:
            self.state.momentum()  # `clear` may have come after the gradients
            self._has_momentum = False
        sender = None if self.flags else workspace.sender  # packets written by a device have no flags
        threshold = workspace.predictor.threshold
        if sender is not None and threshold < math.inf and sender.takes(self.gradients):
            sender.start(self.gradients, self.state, scale, threshold, step, self._masks)
            self._sender = sender
            return
        seen = self.kernels.accumulate(self.gradients, self.state, scale, workspace.search)
        self._message = self._from_host(workspace, seen)

    @property
    def ready(self) -> bool:
        """Whether `message` would return at once."""
        return self._sender is None or self._sender.ready

    def message(self) -> Message:
        """Wait for the step of `begin_compress`, not for other buckets; return its message, once.

        The payload is reused by the next step. Where a device could not choose (candidates too few or too many, a value
        rounded to zero), or an element is not finite, the host does: the device has then left u and v as the pass did,
        and no other bucket writes to them.
        """
        sender, workspace, self._sender = self._sender, self._workspace, None
        if sender is not None:
            assert workspace is not None
            seen, sent = sender.finish()
            if sent is None:
                return self._from_host(workspace, seen)
            self._sent, count = sent, sent.positions.size
            workspace.predictor.learn(count, sender.min_magnitude, seen.num_candidates)
            return Message(sender.payload, workspace.exchange.rounds[0], count)
        message, self._message = self._message, None
        assert message is not None, "begin_compress comes first"
        return message

    def _from_host(self, workspace: Workspace, seen: AccumulateResult) -> Message:
        """Select, encode and subtract on the host, after a pass."""
        if not seen.residual_finite:  # sums of finite gradients can overflow fp32
            self.clear()
        if not (seen.gradients_finite and seen.residual_finite):
            return self._send(workspace, NO_ELEMENTS, FLAG_NONFINITE)
        if self.bucket.uncompressed:
            return self._send(workspace, Elements(self._every, self.kernels.to_host(self.state.v).copy()), 0)
        return self._send(workspace, self._select(workspace, seen), 0)

    @property
    def _masks(self) -> bool:
        """Whether u is set to zero at sent elements."""
        return self.state.u is not None and self.config.factor_masking

    def _workspace_for(self, density: float) -> Workspace:
        if self._workspace is None or self._workspace.density != density:
            self._workspace = Workspace(self.whole, self.config, self.kernels, density, self.topology, self.state)
            if not self._workspace.exchange.keeps_remainder:
                self.state.release_remainder()
        return self._workspace

    def _select(self, workspace: Workspace, seen: AccumulateResult) -> Elements:
        threshold = workspace.search.threshold
        view = ResidualView(self.kernels, self.state.v, seen.candidates, threshold, seen.sums)
        chosen = select(self.config.rule, view, workspace.capacity, self._generator)
        workspace.predictor.learn(chosen.values.size, min_magnitude(chosen), seen.num_candidates)
        return chosen

    def _generator(self) -> np.random.Generator:
        """Return a random source that depends on rank, bucket and step only."""
        # 0: a run that is resumed draws as it did when a bucket could have several ranges
        key = (self.config.seed, self.rank, self.bucket.index, 0, self._step)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))

    def _send(self, workspace: Workspace, elements: Elements, flags: int) -> Message:
        sending = workspace.exchange.begin(elements, flags | self.flags, self._step)
        count = sending.elements.values.size
        masked = workspace.masked[:count] if self._masks else None
        self._sent = HostSentRecord(self.kernels, sending.elements, masked)
        self.kernels.update_residual(self.state, sending.elements, sending.decoded, masked)
        return Message(sending.buffer, workspace.exchange.rounds[0], count)

    # -- state

    def clear(self) -> None:
        """Set u, v and the remainder to zero."""
        self._drop_message()
        self.state.clear()
        self._sent = None
        if self._workspace is not None:
            self._workspace.exchange.commit()  # there is nothing left to roll back
            self._workspace.predictor.forget()

    @property
    def sent(self) -> Elements:
        """Elements of the last `message`, with their values in v, until the step ends."""
        return self._sent.elements if self._sent is not None else NO_ELEMENTS

    @property
    def sent_positions(self) -> np.ndarray:
        """Positions of `sent`, int32, ascending; until the next step."""
        return self._sent.positions if self._sent is not None else NO_ELEMENTS.positions

    @property
    def threshold(self) -> float:
        """The smallest magnitude sent at the last step; 0 if it is not known."""
        return self._workspace.predictor.min_magnitude if self._workspace is not None else 0.0

    @property
    def thresholds(self) -> np.ndarray:
        """The memory of the threshold predictor as one vector; empty before the first step."""
        if self._workspace is None:
            return np.empty(0)
        return np.concatenate([[self._workspace.density], self._workspace.predictor.memory])

    @thresholds.setter
    def thresholds(self, memory: np.ndarray) -> None:
        self._workspace = None
        if memory.size and 0 < memory[0] <= 1:
            predictor = self._workspace_for(float(memory[0])).predictor
            if predictor.memory.size == memory.size - 1:
                predictor.memory = memory[1:]

    def as_one_of_all(self, part: str) -> np.ndarray:
        """Copy one part of the whole bucket to the host, scaled so that its mean over ranks is the mean over nodes.

        The residual includes the remainder of a shard owner.
        """
        kept, place = self.state.full_vector(part), self.topology
        if place.node_size == 1:
            return kept
        whole = np.zeros((place.node_size, kept.size), np.float32)
        whole[place.local_rank] = kept * np.float32(place.node_size)
        return whole.reshape(-1)[: self.whole.numel]

    def commit(self) -> None:
        """End a step that is applied on every rank; it cannot be rolled back any more."""
        self._sent = None
        if self._workspace is not None:
            self._workspace.exchange.commit()

    def rollback(self) -> None:
        """Undo the sending of the last `begin_compress`: v and u have the bits they had after accumulation."""
        self._drop_message()
        if self._sent is None:
            return
        self._sent.rollback(self.state)
        self._sent = None
        self.exchange.rollback()

    def _drop_message(self) -> None:
        """Wait for a step that a device still makes, as it writes to u and v; forget a message that was not taken."""
        if self._sender is not None:
            self.message()
        self._message = None

    # -- receiving

    @property
    def exchange(self) -> Exchange:
        """The exchange of the present step."""
        assert self._workspace is not None, "compress comes first"
        return self._workspace.exchange

    @property
    def round(self) -> Round:
        """The next collective."""
        return self.exchange.rounds[min(self._round, len(self.exchange.rounds) - 1)]

    @property
    def has_more_rounds(self) -> bool:
        """Whether another round follows the next collective."""
        return self._round + 1 < len(self.exchange.rounds)

    def spec(self, density: float) -> MessageSpec:
        """Return packet format, exchange and rounds of the bucket at a density."""
        return message_spec(self.whole, self.config, density, self.topology)

    def receive(self, received: np.ndarray) -> np.ndarray | None:
        """Check the result of the present round. An error leaves u and v unchanged.

        Args:
            received: result of the round, flat, of the round's dtype; kept until the next call or `settle`.

        Returns:
            The buffer of the next round; None after the last.

        Raises:
            CorruptPacket, RankMismatch: on every rank, see `Exchange.proceed`.
        """
        exchange = self.exchange
        try:
            buffer = exchange.proceed(self._round, received, self._step)
        except DGCError:
            exchange.rollback()
            raise
        self._round += 1
        return buffer

    def aggregate_into(self, scale: float) -> None:
        """``update = scale * sum over ranks of the sent elements``, with the same bits on every rank.

        The update is written to `outputs`, which must have an array for each segment. A device only begins to.

        Args:
            scale: factor of the sum: 1/N for the mean, 1 for the sum, times the loss scale.
        """
        self.exchange.aggregate_into(self.outputs, scale)

    def settle(self) -> bool:
        """Complete `aggregate_into`, and set `outcome`; return whether every element of the update is finite.

        Raises:
            CorruptPacket, RankMismatch: on every rank, where packets are checked on a device; u and v are unchanged.
        """
        finite = self.exchange.settle()
        self.outcome = self.exchange.outcome
        return finite
