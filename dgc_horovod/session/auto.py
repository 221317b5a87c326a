"""One optimizer's choice of an exchange: what its ranks have measured, what that comes to, and what they say.

Nothing here communicates: adapters sum what every rank gives, and tell every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.notices import JOINED, SPARSE, tell_choice, tell_given_up, tell_too_short
from dgc_horovod.planning.cost_model import Observed, predicted
from dgc_horovod.planning.trial import COMPRESSED, DENSE, SETTLING, TIMED, Trial, is_too_short
from dgc_horovod.state.residual_state import EARLIER_FP16, UNDECIDED

PROBED, REPEATS = 2**20, 3  # elements, at most, of an allreduce that is timed, and how often
_WORTH = 10  # a run has so many times the steps that a choice takes, or none is made


class Choice:
    """A `Trial` of all ranks: in each comparison a rank gives `own`, and takes the sums over the ranks.

    Args:
        exchange: the compressed exchange.
        stock: whose the uncompressed exchange is, in words.
        on_gloo: whether it is Gloo's, on a CPU.

    Attributes:
        trial: trial under way, or ended.
        given_up: whether the uncompressed exchange is to stay, whatever the clock says: the same on every rank once all
            have ended a step, or are in join.
        script_clips: whether the script has clipped gradients of this rank by itself.
        script_accumulates: whether it has made a step of several exchanged gradients, or of none.
    """

    def __init__(self, exchange: OptimizerExchange, stock: str, on_gloo: bool) -> None:
        self.exchange, self._stock, self._on_gloo = exchange, stock, on_gloo
        self._dense: list[float] = []  # seconds of a dense step, and those of waiting, the same on every rank
        self.given_up = self.script_clips = self.script_accumulates = False
        self.begin()

    def begin(self) -> None:
        """Choose anew; where there is nothing to choose, the uncompressed exchange stays."""
        config, self.trial = self.exchange.config, Trial()
        total = config.total_steps
        short = total is not None and (total < _WORTH * (SETTLING + TIMED) or is_too_short(total))
        if self.exchange.workers == 1 or not self.exchange.compressed or short or self.given_up:
            self.trial.stay()
        if total is not None and short and self.speaks:
            tell_too_short(total, config.density, self._stock)

    def resume(self, mode: str) -> None:
        """Go on with what was chosen, `ResidualState.mode`; what was saved without a choice was compressed."""
        if mode == UNDECIDED:
            self.begin()
        else:
            self.trial.stay({"": COMPRESSED, EARLIER_FP16: DENSE}.get(mode, mode))

    def give_up(self, why: str) -> None:
        """The present exchange stays until all ranks can go back to the uncompressed one, which then stays."""
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
            now: seconds on a clock that goes evenly.
            waited: seconds of it in which the uncompressed exchange was waited for, >= 0.

        Returns:
            Whether the ranks are to compare: `own`, `compare`, and where that says so the link, `expect`.
        """
        if not self.trial.step_ended(now, waited):
            return False
        if self.exchange.ranks_in_join:
            self.give_up(JOINED)  # those in join answer nothing but steps
            return False
        return True

    def own(self) -> list[float]:
        """What a rank gives of its times."""
        return [1.0, *self.trial.own()]

    def compare(self, sums: Sequence[float]) -> bool:
        """Take the sums of `own`; whether the link is to be timed as well: then `expect`."""
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
        """Number of elements of the longer allreduce that is timed, > 1."""
        return max(2, min(PROBED, sum(self.exchange.numel.values()) // 8))

    def observed(self, one: float, many: float, sparse: bool) -> list[float]:
        """What a rank gives of the link and of its gradients.

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
        """Take the sums of `observed`: compression is tried if the cost model does not expect it to be slower."""
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
        """Means over the ranks; None where some have no more data: Horovod's join answers with zeros for them."""
        return [total / sums[0] for total in sums[1:]] if round(sums[0]) == self.exchange.workers else None
