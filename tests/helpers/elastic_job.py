"""An elastic training job in which one worker is killed: what horovodrun starts in tests/parallel/test_elastic.py.

``python -m tests.helpers.elastic_job FOLDER ADAPTER METHOD HOW`` with METHOD "dgc" or "local", and HOW "undisturbed" or
"killed", alone or with ", flushed"; with local steps also "killed, within a round": commits are then not at exchanges.
The worker dies in the middle of a step, or of an exchange of local steps; under Keras it dies between two steps.
Every rank writes FOLDER/rankN.json at the end; rank 0 prints an account of what was owed when the ranks changed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.adapters import Adapter, Compression
from tests.helpers.run import INPUTS, target

H, BATCHES, TOGETHER_AGAIN_BY = 5, 300, 200
KILLED_AT = 89  # the exchange after this batch is one of a full round
COMMIT_EVERY, WITHIN_A_ROUND = 10, 7
FLUSH_EVERY = 50  # a flush is a burst: every ten steps it would be what decides the quality
MEASURED = 30  # last batches, over which the loss is averaged: after a single one it differs by half between runs


def batch_of(number: int, samples: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Samples that all ranks together have at a step."""
    x = np.random.default_rng(number).standard_normal((samples, INPUTS)).astype(np.float32)
    return x, target(x)


class Job:
    """One worker's part."""

    def __init__(self, folder: Path, name: str, method: str, how: str) -> None:
        self.folder, self.adapter, self.local, self.how = folder, Adapter(name), method == "local", how
        self.adapter.ranks.init()
        if self.local:
            compression = Compression.local(H, density=0.05, min_numel=16, check_every=1)
            self.run = self.adapter.start(compression, "AdamW", lr=2e-3)
        else:
            compression = Compression.dgc(0.02, min_numel=16, clip_norm=2.0, check_every=5)
            self.run = self.adapter.start(compression, momentum=0.9)
        self.batch, self.size = 0, 0
        self.losses: dict[int, float] = {}  # after each of the last batches, on samples of no batch
        self.own, self.committed = np.zeros(1), np.zeros(1)  # of all elements, once there are any
        every = WITHIN_A_ROUND if "within a round" in how else COMMIT_EVERY
        self.commit_every = FLUSH_EVERY if "flushed" in how else every

    def die_in_the_middle(self) -> None:
        """Under PyTorch the gradients are on their way then, or the changes of a round."""
        if self.local:
            rounds = self.run.session.strategy.rounds
            receive = rounds.receive

            def received() -> bool:
                if self.run.exchanged == KILLED_AT // H:
                    self.may_die()
                return bool(receive())

            rounds.receive = received
        else:
            self.run.optimizer.register_step_pre_hook(lambda *_: self.may_die() if self.batch == KILLED_AT else None)

    def may_die(self) -> None:
        """Be killed, if it is this worker's turn: the last one's, if none has been before."""
        flag = self.folder / "killed"
        if "killed" in self.how and self.adapter.rank == self.size - 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def work(self) -> None:
        """Train to the end."""
        elastic = self.adapter.module.elastic if self.adapter.kind == "keras" else self.adapter.ranks.elastic
        state = self.run.state(flush_on_commit="flushed" in self.how, sizes=[])
        if self.adapter.kind == "torch":
            self.die_in_the_middle()
        elastic.run(self.train)(state)
        found = {
            "fingerprint": self.run.print, "loss": np.mean([*self.losses.values()]), "sizes": state.sizes,
            "batch": state.batch,
        }  # fmt: skip
        (self.folder / f"rank{self.adapter.rank}.json").write_text(json.dumps(found))

    def train(self, state: Any) -> None:
        """What is run again whenever the ranks change."""
        self._settle(state)
        while state.batch < BATCHES:
            self.batch = state.batch
            if self.batch == KILLED_AT and self.adapter.kind == "keras":
                self.may_die()
            self.run.on(*(part[self.adapter.rank :: self.size] for part in batch_of(self.batch)))
            state.batch += 1
            state.sizes = [*state.sizes, self.size]
            if state.batch % self.commit_every == 0:
                if "flushed" in self.how:
                    self.run.optimizer.flush()  # as the commit does, to look at what is left
                self._note()
                state.commit()
            if state.batch > BATCHES - MEASURED:
                self.losses[state.batch] = self.run.loss(*batch_of(10**6, 2000))
            if "killed" in self.how and state.batch > TOGETHER_AGAIN_BY and self.size < 3:
                time.sleep(0.3)  # the third one needs time to come back
        if self.local:
            self.run.optimizer.exchange()  # batches may end within a round

    def _note(self) -> np.ndarray:
        """What all ranks owe the model, ``(1/N) * sum of v``, tensor after tensor; a collective."""
        parts = [arrays["v"].astype(np.float64) for _, arrays in sorted(self.run.copied.items())]
        every = self.adapter.of_all_ranks(np.concatenate(parts or [np.zeros(1)]))
        self.own, self.committed = every[self.adapter.rank] / len(every), sum(every) / len(every)
        return self.committed

    def _settle(self, state: Any) -> None:
        """Account for what was owed at the last commit: by those that are still here, and by those that are not."""
        every = self.adapter.of_all_ranks([self.own, self.committed])
        self.size, survivors, before = len(every), sum(own for own, _ in every), every[0][1]
        now, seen = self._note(), self._seen() if self.local else {}
        norms = {
            "owed before": before, "of survivors": survivors, "owed now": now, "difference": now - survivors,
            "lost": before - survivors,
        }  # fmt: skip
        account = {name: float(np.linalg.norm(x)) for name, x in norms.items()}
        if self.adapter.rank == 0:
            print("account:", json.dumps({"batch": state.batch, "ranks": self.size, **account, **seen}), flush=True)

    def _seen(self) -> dict[str, Any]:
        """What else an account of local steps holds. A collective."""
        seen = {"spread": self.run.apart, "in the round": self.run.of_round}
        if self.adapter.kind == "keras":  # of Adam's moments, which begin with zeros
            seen["moments"] = self.adapter.of_all_ranks(any(bool(x.any()) for x in self.run.slots()))
            steps = int(self.run.optimizer.iterations)
        else:
            inner = self.run.optimizer.state[next(self.run.model.parameters())]
            steps = int(inner["step"]) if "step" in inner else 0
        return {**seen, "inner steps": self.adapter.of_all_ranks(steps)}


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Job(Path(sys.argv[1]), *sys.argv[2:]).work()
