"""One optimizer's choice of an exchange: measurements of the ranks, the decision, and its messages.

Nothing here communicates: adapters sum the vectors of all ranks, and give every rank the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.notices import JOINED, SPARSE, tell_choice, tell_given_up, tell_too_short
from dgc_horovod.planning.cost_model import Observed, predicted
from dgc_horovod.planning.trial import COMPRESSED, DENSE, SETTLING, TIMED, Trial, is_too_short
from dgc_horovod.state.residual_state import EARLIER_FP16, UNDECIDED

PROBED, REPEATS = 2**20, 3  # most elements of a timed allreduce, and its repetitions
_WORTH = 10  # a choice is made if the run has at least so many times the steps of a trial


class Choice:
    """A `Trial` of all ranks: in each comparison a rank gives `own`, and takes the sum over the ranks.

    Args:
        exchange: the compressed exchange.
        stock: name of the uncompressed exchange, for messages.
        on_gloo: whether its allreduces are Gloo's, on a CPU.

    Attributes:
        trial: trial under way, or ended.
        given_up: whether the uncompressed exchange is to stay, whatever the times: the same on every rank once all have
            ended a step, or are in join.
        script_clips: whether the script itself has clipped gradients of this rank.
        script_accumulates: whether the script has made a step of several exchanged gradients, or of none.
    """

    def __init__(self, exchange: OptimizerExchange, stock: str, on_gloo: bool) -> None:
        self.exchange, self._stock, self._on_gloo = exchange, stock, on_gloo
        self._dense: list[float] = []  # seconds of a dense step, and those of waiting, the same on every rank
        self.given_up = self.script_clips = self.script_accumulates = False
        self.begin()

    def begin(self) -> None:
        """Begin a new trial; if no choice is possible, the uncompressed exchange stays."""
        config, self.trial = self.exchange.config, Trial()
        total = config.total_steps
        short = total is not None and (total < _WORTH * (SETTLING + TIMED) or is_too_short(total))
        if self.exchange.workers == 1 or not self.exchange.compressed or short or self.given_up:
            self.trial.stay()
        if total is not None and short and self.speaks:
            tell_too_short(total, config.density, self._stock)

    def resume(self, mode: str) -> None:
        """Go on with the saved choice, `ResidualState.mode`; a state saved without one was compressed."""
        if mode == UNDECIDED:
            self.begin()
        else:
            self.trial.stay({"": COMPRESSED, EARLIER_FP16: DENSE}.get(mode, mode))

    def give_up(self, why: str) -> None:
        """End the trial: the ranks go back to the uncompressed exchange as soon as all can, and stay with it."""
        if not self.given_up and self.speaks:
            tell_given_up(why, self._stock)
        self.given_up = True
        self.trial.stay()

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
        if not self.trial.step_ended(now, waited):
            return False
        if self.exchange.ranks_in_join:
            self.give_up(JOINED)  # ranks in join take part in steps only
            return False
        return True

    def own(self) -> list[float]:
        """Return the times of this rank, a vector for a sum over the ranks."""
        return [1.0, *self.trial.own()]

    def compare(self, sums: Sequence[float]) -> bool:
        """Take the sums of `own`; returns whether the link is to be timed, for `expect`."""
        means = self._means(sums)
        if means is None:
            self.give_up(JOINED)
        elif not self.trial.times_more(means[0]):
            if self.trial.mode == DENSE:
                self._dense = means
                return True
            self.trial.tried(means[0])
            self._conclude(None)
        return False

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
        found = self._means(sums)
        if found is None:
            return self.give_up(JOINED)
        one, many, sparse, hindered = found
        if sparse:
            return self.give_up(SPARSE)
        step, waited = self._dense
        observed = Observed(step, waited, one, many, self.probed)
        expected = None if hindered else predicted(self.exchange, observed, self._on_gloo)
        self.trial.dense_timed(observed.step, expected)
        self._conclude(expected)

    def _conclude(self, expected: float | None) -> None:
        self.exchange.counts.trial_seconds = dict(self.trial.seconds)
        if self.speaks:
            tell_choice(self.exchange, self.trial, expected, self._stock)

    def _means(self, sums: Sequence[float]) -> list[float] | None:
        """Means over the ranks; None if some have no more data: Horovod's join sends zeros for them."""
        return [total / sums[0] for total in sums[1:]] if round(sums[0]) == self.exchange.workers else None
