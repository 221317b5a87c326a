"""The Keras twin of `local_elastic_job`: ``python -m tests.helpers.keras_local_elastic_job FOLDER HOW``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from horovod.tensorflow.functions import allgather_object

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers import keras_elastic_job
from tests.helpers.keras_elastic_job import BATCHES, KILLED_AT
from tests.helpers.keras_training import weights

__all__ = ["BATCHES", "KILLED_AT"]
H, WITHIN_A_ROUND, LEAST = 5, 7, 16


class Job(keras_elastic_job.Job):
    """One worker's part."""

    def wrapped(self) -> Any:
        compression = Compression.local(H, density=0.05, min_numel=LEAST, check_every=1)
        return DistributedOptimizer(keras.optimizers.AdamW(2e-3), compression=compression)

    def is_compressed(self, weight: Any) -> bool:
        return int(np.prod(weight.shape)) >= LEAST

    def commit_every(self) -> int:
        return WITHIN_A_ROUND if "within a round" in self.how else super().commit_every()

    def end(self) -> None:
        self.model.optimizer.exchange()  # batches may end within a round

    def seen(self) -> dict[str, Any]:
        every = np.stack(allgather_object(weights(self.model), name="spread"))
        optimizer = self.model.optimizer
        steps = allgather_object(int(optimizer.iterations), name="steps")
        # of Adam's moments, which begin with zeros
        moments = allgather_object(bool(any(slot.numpy().any() for slot in optimizer.variables[2:])), name="moments")
        return {
            "spread": float(np.abs(every - every[:1]).max()), "in the round": int(session(optimizer).rounds.calls),
            "inner steps": steps, "moments": moments,
        }  # fmt: skip


if __name__ == "__main__":
    keras_elastic_job.main(Job)
