"""One optimizer's choice of an exchange: measurements of the ranks, the decision, and its messages.

Nothing here communicates: adapters sum the vectors of all ranks, and give every rank the sums.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.notices import JOINED, SPARSE, make_visible
from dgc_horovod.planning.cost_model import Observed, predicted
from dgc_horovod.planning.trial import COMPRESSED, DENSE, GAIN, HOPEFUL, MOST_TIMED, SETTLING, TIMED, is_too_short
from dgc_horovod.state.residual_state import EARLIER_FP16, UNDECIDED

_log = logging.getLogger("dgc_horovod")
PROBED, REPEATS = 2**20, 3  # most elements of a timed allreduce, and its repetitions
_LEAST_SECONDS = 1.0  # that are timed: disturbances by other programs last some tenths of a second
_CLOSE = 1.3  # ratio of times below which more steps are timed


class Choice:
    """The trial of all ranks: dense steps are timed, then compressed ones if those are predicted to be faster.

    In each comparison a rank gives `own`, and takes the sum over the ranks.

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
        self._waited = 0.0  # seconds of waiting in a dense step, the same on every rank
        self.given_up = self.script_clips = self.script_accumulates = False
        self.begin()

    def begin(self) -> None:
        """Begin a new trial; if no choice is possible, the uncompressed exchange stays."""
        exchange, total = self.exchange, self.exchange.config.total_steps
        self.seconds: dict[str, float] = {}
        self._time(DENSE)
        short = total is not None and is_too_short(total)
        self.ended = exchange.workers == 1 or not exchange.compressed or short or self.given_up
        if short and self.speaks:
            needed = f"whose density would have to be {exchange.config.density:g}"
            text = f"{total} steps are too few for compression, {needed}, or for a trial"
            make_visible()
            _log.warning("dgc_horovod: auto: %s: %s stays", text, self._stock)

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
        if not self.given_up and self.speaks:
            _log.info("dgc_horovod: auto: %s; %s stays", why, self._stock)
        self.given_up = True
        self.stay()

    @property
    def speaks(self) -> bool:
        """Whether this rank decides for all, and tells the user."""
        return self.exchange.rank == 0

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
            Whether the ranks are to compare times: `own`, `compare`, and if that returns true, `observed` and `expect`.
        """
        if self.ended:
            return False
        self._untimed -= 1
        if self._untimed < 0:
            self._times.append(now - self._last)
            self._waits.append(waited)
        self._last = now
        compares = len(self._times) == self._timed
        if compares and self.exchange.ranks_in_join:
            self.give_up(JOINED)  # ranks in join take part in steps only
        return compares and not self.given_up

    def own(self) -> list[float]:
        """Return the median times of this rank's steps and waits, a vector for a sum over the ranks."""
        return [1.0, statistics.median(self._times), statistics.median(self._waits)]

    def meet(self, sums: Sequence[float]) -> list[float] | None:
        """Return means over the ranks of a vector that begins with a 1 of each.

        If some have no more data, give up, and return None: Horovod's join sends zeros for them.
        """
        if round(sums[0]) == self.exchange.workers:
            return [total / sums[0] for total in sums[1:]]
        self.give_up(JOINED)
        return None

    def compare(self, sums: Sequence[float]) -> bool:
        """Take the sums of `own`; returns whether the link is to be timed, for `expect`."""
        means = self.meet(sums)
        if means is None or self._times_more(means[0]):
            return False
        if self.mode == DENSE:
            self._dense, self._waited = means
            return True
        self.decide(means[0], None)
        return False

    def _times_more(self, seconds: float) -> bool:
        """Whether more steps are timed before a decision: if steps are short, unless the difference is clear."""
        wanted, dense = min(MOST_TIMED, math.ceil(_LEAST_SECONDS / seconds)), self.seconds.get(DENSE)
        is_plain = dense is not None and not 1 / _CLOSE < seconds / dense < _CLOSE
        if wanted <= self._timed or is_plain:
            return False
        self._timed = wanted
        return True

    @property
    def probed(self) -> int:
        """Number of elements of the longer of the timed allreduces, > 1."""
        return max(2, min(PROBED, sum(self.exchange.numel.values()) // 8))

    def observed(self, one: float, many: float, sparse: bool) -> list[float]:
        """Return the times of the link and the state of the gradients, a vector for a sum over the ranks.

        Args:
            one, many: seconds of an allreduce of one element, and of `probed`.
            sparse: whether there are sparse gradients.
        """
        config, nodes = self.exchange.config, self.exchange.topology.node_size > 1
        # workers of a node might differ in what they clip, see `NodeGradientExchange`
        clips = self.script_clips and nodes and config.clip_norm is None
        hindered = clips or self.script_accumulates
        return [1.0, one, many, float(sparse), float(hindered)]

    def expect(self, sums: Sequence[float]) -> None:
        """Take the sums of `observed`, and try compression unless the cost model predicts that it is slower."""
        found = self.meet(sums)
        if found is None:
            return
        one, many, sparse, hindered = found
        if sparse:
            return self.give_up(SPARSE)
        observed = Observed(self._dense, self._waited, one, many, self.probed)
        self.decide(observed.step, None if hindered else predicted(self.exchange, observed, self._on_gloo))

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
        if self.speaks:
            self._tell(expected)

    def _tell(self, expected: float | None) -> None:
        """Log the exchange that is tried next or stays, the times, and the time that is expected."""
        names = {DENSE: self._stock, COMPRESSED: f"compression at density {self.exchange.density():g}"}
        text = f"{names[self.mode]} stays" if self.ended else f"trying {names[self.mode]}"
        text += ": " + ", ".join(f"{names[mode]} {1e3 * time:,.0f} ms a step" for mode, time in self.seconds.items())
        if expected is not None:
            text += f"; expected: {names[COMPRESSED]} {1e3 * expected:,.0f} ms"
        _log.info("dgc_horovod: step %d: %s", self.exchange.steps, text)
