"""What a script clips of the gradients of a compressed tape, learnt from the call, and done before compression.

What comes back from the ranks is an update: it arrives in bursts, of several times the norm of a gradient, and what a
limit cuts from it is lost. So the graph of a tape's exchange can clip each rank's own gradient (DGC 3.1), and looks up
when it runs how: a script clips after ``tape.gradient``, when that graph is made already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.core.clipping import clip_limit
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.tensorflow.clipping.of_optimizer import KINDS
from dgc_horovod.tensorflow.gradients.host_calls import behind, host_call
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.wrapping.settings import Settings
from dgc_horovod.tensorflow.wrapping.variables import Gradient, native

_log = logging.getLogger("dgc_horovod")
INSTEAD = "pass clip_norm=... to the compression (dgcrun: --dgc-clip-norm), which clips each rank's gradient"
_told: set[str] = set()


class LearntClipping:
    """What a script clips of the gradients of one traced exchange, or of all eager ones.

    Args:
        count: number of gradients.
        settings: settings of the tape.
    """

    def __init__(self, count: int, settings: Settings) -> None:
        self._settings = settings
        self._kind, self._limits = "", np.full(count, np.inf, np.float32)
        self._applied = ""  # the kind that the last eager step was exchanged with
        self._in_use = False  # whether the last step asked for it

    def begin(self) -> None:
        """An eager step begins: what the one before has not asked for any more is forgotten."""
        if not self._in_use:
            self._kind = ""
            self._limits[:] = np.inf
        self._applied, self._in_use = self._kind, False

    def learn(self, kind: str, numbers: Iterable[int], c: Any, what: str) -> bool:
        """Clip by `kind` from now on; returns whether this step's gradients are, or will be, clipped so.

        Args:
            kind: name of the clipping as Keras calls it, one of `KINDS`.
            numbers: indices of the gradients, from 0.
            c: limit of the averaged (or summed) gradient, > 0 and finite.
            what: name of the call that asks for it, for messages.
        """
        config, limit = self._settings.config, number(c)
        assert config is not None
        if config.clip_norm is not None:
            self._tell(what, f"clip_norm={config.clip_norm:g} of the compression is used; {what} changes nothing")
            return True
        if limit is None or not 0 < limit < np.inf:
            raise UnsupportedUse(
                f"{what} with a limit that is no positive number when it is traced, of what a compressed tape has "
                f"returned, an update in bursts; {INSTEAD}"
            )
        if self._in_use and self._kind != kind:
            raise UnsupportedUse(f"{self._kind} and {kind} of the same gradients of a compressed tape; {INSTEAD}")
        self._kind, self._in_use = kind, True
        self._limits[list(numbers)] = clip_limit(limit, self._settings.process_set.size(), self._settings.averages)
        self._tell(
            what,
            f"{what} (limit {limit:g}) is done to each rank's own gradient, before it is compressed, at "
            f"{'sqrt(N)' if self._settings.averages else '1/sqrt(N)'} times its limit; what comes back is not clipped",
        )
        return self._applied == kind or not tf.executing_eagerly()

    def _tell(self, what: str, text: str) -> None:
        if what not in _told and self._settings.process_set.rank() == 0:
            _log.warning("dgc_horovod: %s", text)
        _told.add(what)

    def applied(self, gradients: Sequence[tf.Tensor], started: tf.Tensor) -> list[tf.Tensor]:
        """`gradients` of this rank, clipped as was learnt by the time the graph runs; `started`: of the step."""
        kind, limits = host_call(self._read, [started], [tf.int32, tf.float32])
        kind.set_shape([])
        limits.set_shape([len(gradients)])

        def by_norm() -> list[tf.Tensor]:
            return [_within(g, tf.norm(_fp32(g)), limits[i]) for i, g in enumerate(gradients)]

        def by_global_norm() -> list[tf.Tensor]:
            norm = tf.linalg.global_norm([_fp32(gradient) for gradient in gradients])
            return [_within(gradient, norm, limits[0]) for gradient in gradients]

        def by_value() -> list[tf.Tensor]:
            fp32 = [tf.clip_by_value(_fp32(g), -limits[i], limits[i]) for i, g in enumerate(gradients)]
            return [tf.cast(value, gradient.dtype) for value, gradient in zip(fp32, gradients, strict=True)]

        branches = {"clipnorm": by_norm, "global_clipnorm": by_global_norm, "clipvalue": by_value}
        return list(tf.switch_case(kind, [lambda: list(gradients), *(branches[kind] for kind in KINDS)]))

    def _read(self, _: Any) -> list[Any]:
        return [np.int32(KINDS.index(self._kind) + 1 if self._kind else 0), self._limits.copy()]


def number(limit: Any) -> float | None:
    """`limit`, if it is known now."""
    value = native(limit)
    if isinstance(value, tf.Variable):
        value = value.numpy() if tf.executing_eagerly() else None
    elif tf.is_tensor(value):
        value = tf.get_static_value(value)
    return None if value is None or np.ndim(value) else float(value)


def _fp32(gradient: tf.Tensor) -> tf.Tensor:
    return tf.cast(gradient, tf.float32)


def _within(gradient: tf.Tensor, norm: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    return gradient * tf.cast(tf.minimum(limit / norm, 1.0), gradient.dtype)


class Returned:
    """What a compressed tape has returned in one call.

    Args:
        clipping: learnt clipping of its exchange.
        own: gradients of this rank.
        combined: tensors that came back for them; each carries a mark from now on.
        collectives: transport of its exchange.
    """

    def __init__(
        self, clipping: LearntClipping, own: Sequence[Gradient], combined: Sequence[Any], collectives: Collectives
    ) -> None:
        self.clipping, self._own, self._collectives = clipping, list(own), collectives
        self._first, self.count = combined[0], len(combined)
        self._norm: tf.Tensor | None = None
        for i, tensor in enumerate(combined):
            tensor._dgc_returned = self, i

    @property
    def norm(self) -> tf.Tensor:
        """Norm of the gradients before they were clipped: root mean square of the ranks' norms, equal on every rank."""
        if self._norm is None:
            squares = tf.square(tf.linalg.global_norm([_fp32(tf.convert_to_tensor(g)) for g in self._own]))
            name, collectives = "norm", self._collectives  # whose clock is free once the exchange has ended

            def reduced(armed: tf.Tensor) -> tf.Tensor:
                return collectives.allreduce(behind(armed, squares), name)

            total = collectives.in_time(name, [squares, self._first], reduced)
            self._norm = tf.sqrt(total / collectives.size(tf.float32))
        return self._norm


def marks(tensors: Iterable[Any], what: str = "") -> tuple[Returned, list[int]] | None:
    """What `tensors` (or None) have been returned by, and as which; None if by no compressed tape.

    Raises:
        UnsupportedUse: some of them, or by two.
    """
    found = [getattr(tensor, "_dgc_returned", None) for tensor in tensors if tensor is not None]
    known = [each for each in found if each is not None]
    if not known:
        return None
    if len(known) < len(found) or len({returned for returned, _ in known}) > 1:
        raise UnsupportedUse(
            f"{what} of gradients that a compressed tape has returned together with others (local ones, or another "
            f"tape's); clip those alone, and {INSTEAD}"
        )
    return known[0][0], [i for _, i in known]
