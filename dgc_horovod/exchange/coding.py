"""What every exchange of coded elements begins with: encode, and leave behind what rounds to zero."""

from __future__ import annotations

import numpy as np

from dgc_horovod.kernels.contract import Elements
from dgc_horovod.wire.codecs.values import Draw
from dgc_horovod.wire.packet import Coder, PacketFormat, coder_for


class Encoder:
    """Writes one rank's packets of one form, into the same memory each time.

    Args:
        wire: the form.
        coder: of the backend.
        drops_zeros: whether elements that a codec rounds to zero stay behind; not where all or none are sent.
    """

    def __init__(self, wire: PacketFormat, coder: Coder, drops_zeros: bool) -> None:
        self.packet = np.zeros(wire.nbytes, np.uint8)
        self._wire, self._coder, self._drops_zeros = wire, coder_for(wire, coder), drops_zeros
        self._decoded = np.empty(wire.capacity, np.float32)

    def encode(self, elements: Elements, flags: int, step: int, draw: Draw) -> tuple[Elements, np.ndarray]:
        """Fill `packet`; what is in it, as it stood in the residual, and its values as receivers read them."""
        decoded = self._decoded[: elements.values.size]
        while self._zeros(elements, step, flags, decoded, draw) and self._drops_zeros:
            kept = decoded != 0  # what was rounded to zero is not sent, so it is not masked either
            elements = Elements(elements.positions[kept], elements.values[kept])
            decoded = self._decoded[: elements.values.size]
        return elements, decoded

    def _zeros(self, elements: Elements, step: int, flags: int, decoded: np.ndarray, draw: Draw) -> int:
        return self._wire.encode(self._coder, *elements, step, flags, self.packet, decoded, draw)
