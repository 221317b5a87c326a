"""One optimizer's choice of an exchange: measurements of the ranks, the decision, and its messages.

Nothing here communicates: adapters sum the vectors of all ranks, and give every rank the sums.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.notices import JOINED, SPARSE, tell_stock
from dgc_horovod.planning.cost_model import Observed, predicted
from dgc_horovod.planning.trial import COMPRESSED, DENSE, GAIN, HOPEFUL, MOST_TIMED, SETTLING, TIMED, is_too_short
from dgc_horovod.state.residual_state import EARLIER_FP16, UNDECIDED

_log = logging.getLogger("dgc_horovod")
PROBED, REPEATS = 2**20, 3  # most elements of a timed allreduce, and its repetitions
_LEAST_SECONDS = 1.0  # that are timed: disturbances by other programs last some tenths of a second
_CLOSE = 1.3  # ratio of times below which more steps are timed


class Choice:
    """The trial of all ranks: dense steps are timed, then compressed ones if those are predicted to be faster.

    In each comparison a rank gives `own`, and takes the sum over the ranks. Between comparisons ranks may do so to find
    out whether one is in join.

    Args:
        exchange: the compressed exchange.
        stock: name of the uncompressed exchange, for messages.
        on_gloo: whether its allreduces are Gloo's, on a CPU.

    Attributes:
        mode: exchange of the steps to come, `DENSE` or `COMPRESSED`.
        ended: whether it stays.
        seconds: time of a step of each timed exchange, by mode: mean over the ranks of their medians.
        given_up: whether the uncompressed exchange is to stay, whatever the times: the same on every rank once all have
            ended a step, or are in join.
        script_clips: whether the script itself has clipped gradients of this rank.
        script_accumulates: whether the script has made a step of several exchanged gradients, or of none.
    """

    def __init__(self, exchange: OptimizerExchange, stock: str, on_gloo: bool) -> None:
        self.exchange, self._stock, self._on_gloo = exchange, stock, on_gloo
        self.given_up = self.script_clips = self.script_accumulates = False
        self.begin()

    def begin(self) -> None:
        """Begin a new trial; if no choice is possible, the uncompressed exchange stays."""
        exchange, total = self.exchange, self.exchange.config.total_steps
        self.seconds: dict[str, float] = {}
        self._time(DENSE)
        short = total is not None and is_too_short(total)
        self.ended = exchange.workers == 1 or not exchange.compressed or short or self.given_up
        if short and exchange.rank == 0:
            density = f"{exchange.config.density:g}"
            why = f"{total} steps are too few for a trial, or for the density, which would have to be {density}"
            tell_stock(why, self._stock)

    def _time(self, mode: str) -> None:
        """Take an exchange from the next step on, and time it."""
        self.mode, self.ended = mode, False
        self._untimed, self._last, self._timed = SETTLING, 0.0, TIMED
        self._times: list[float] = []
        self._waits: list[float] = []

    def stay(self, mode: str | None = None) -> None:
        """End the trial with `mode`, or with the present one."""
        self.mode, self.ended = mode or self.mode, True

    def resume(self, mode: str) -> None:
        """Go on with the saved choice, `ResidualState.mode`; a state saved without one was compressed."""
        if mode == UNDECIDED:
            self.begin()
        else:
            self.stay({"": COMPRESSED, EARLIER_FP16: DENSE}.get(mode, mode))

    def give_up(self, why: str) -> None:
        """End the trial: the ranks go back to the uncompressed exchange as soon as all can, and stay with it."""
        if not self.given_up and self.exchange.rank == 0:
            _log.info("dgc_horovod: auto: %s; %s stays", why, self._stock)
        self.given_up = True
        self.stay()

    def count(self) -> None:
        """Count a step of the uncompressed exchange."""
        exchange = self.exchange
        exchange.counts.traffic.count_allreduce(4 * sum(exchange.numel.values()), exchange.workers)
        exchange.counts.end_step()
        exchange.steps += 1

    # -- times

    def step_ended(self, now: float, waited: float) -> bool:
        """Count the time of a step.

        Args:
            now: seconds on a monotonic clock.
            waited: seconds of this step that were spent waiting for the uncompressed exchange, >= 0.

        Returns:
            Whether the ranks are to compare times: `own`, then `compare`.
        """
        if self.ended:
            return False
        self._untimed -= 1
        if self._untimed < 0:
            self._times.append(now - self._last)
            self._waits.append(waited)
        self._last = now
        if self._is_due and self.exchange.ranks_in_join:
            self.give_up(JOINED)  # ranks in join take part in steps only
        return self._is_due

    @property
    def _is_due(self) -> bool:
        return not self.ended and len(self._times) == self._timed

    @property
    def probed(self) -> int:
        """Number of elements of the longer of the timed allreduces, > 1."""
        return max(2, min(PROBED, sum(self.exchange.numel.values()) // 8))

    def own(self, one: float = 0.0, many: float = 0.0, sparse: bool = False) -> list[float]:
        """Return the times of this rank and the state of its gradients, a vector for a sum over the ranks.

        Args:
            one, many: in dense steps, seconds of an allreduce of one element, and of `probed`.
            sparse: whether there are sparse gradients.
        """
        config, nodes = self.exchange.config, self.exchange.topology.node_size > 1
        # workers of a node might differ in what they clip, see `NodeGradientExchange`
        hindered = (self.script_clips and nodes and config.clip_norm is None) or self.script_accumulates
        times = [statistics.median(each) if each else 0.0 for each in (self._times, self._waits)]
        return [1.0, *times, one, many, float(sparse), float(hindered)]

    def compare(self, sums: Sequence[float]) -> None:
        """Take the sums of `own`, and decide, unless more steps are to be timed.

        Compression is tried after dense steps, unless the cost model predicts that it is slower.
        """
        if round(sums[0]) != self.exchange.workers:  # Horovod's join sends zeros for ranks that have no more data
            self.give_up(JOINED)
        step, waited, one, many, sparse, hindered = (total / sums[0] for total in sums[1:])
        if not self._is_due or self._times_more(step):
            return
        if sparse:
            return self.give_up(SPARSE)
        expected = None
        if self.mode == DENSE and not hindered:
            observed = Observed(step, waited, one, many, self.probed)
            expected = predicted(self.exchange, observed, self._on_gloo)
        self.decide(step, expected)

    def _times_more(self, seconds: float) -> bool:
        """Whether more steps are timed before a decision: if steps are short, unless the difference is clear."""
        wanted, dense = min(MOST_TIMED, math.ceil(_LEAST_SECONDS / seconds)), self.seconds.get(DENSE)
        is_plain = dense is not None and not 1 / _CLOSE < seconds / dense < _CLOSE
        if wanted <= self._timed or is_plain:
            return False
        self._timed = wanted
        return True

    def decide(self, seconds: float, expected: float | None) -> None:
        """After dense steps try compression, unless it is predicted to be slower; after compressed ones choose.

        Args:
            seconds: mean over the ranks of a step's time, > 0.
            expected: seconds of a compressed step, the same on every rank, after dense steps; None: it is not tried.
        """
        self.seconds[self.mode] = seconds
        if self.mode == COMPRESSED:
            self.stay(COMPRESSED if seconds <= GAIN * self.seconds[DENSE] else DENSE)
        elif expected is not None and expected <= HOPEFUL * seconds:
            self._time(COMPRESSED)
        else:
            self.stay()
        self.exchange.counts.trial_seconds = dict(self.seconds)
        if self.exchange.rank == 0:
            self._tell(expected)

    def _tell(self, expected: float | None) -> None:
        """Log the exchange that is tried next or stays, the times, and the time that is expected."""
        names = {DENSE: self._stock, COMPRESSED: f"compression at density {self.exchange.density():g}"}
        text = f"{names[self.mode]} stays" if self.ended else f"trying {names[self.mode]}"
        text += ": " + ", ".join(f"{names[mode]} {1e3 * time:,.0f} ms a step" for mode, time in self.seconds.items())
        if expected is not None:
            text += f"; expected: {names[COMPRESSED]} {1e3 * expected:,.0f} ms"
        _log.info("dgc_horovod: step %d: %s", self.exchange.steps, text)
