"""What is not finite on one rank, beside a reference that NumPy computes, on real ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from dgc_horovod.errors import NotFinite
from dgc_horovod.testing.torch import kept_by
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.regression import Dividing
from tests.helpers.training import batches, fingerprint, momentum_sgd, smooth_model, train

STEPS, MOMENTUM = 24, 0.9
BAD = {"one NaN": np.nan, "one Inf": np.inf, "all overflowed": -np.inf}


def _gradients(model: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    loss = torch.nn.functional.mse_loss(model(x), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _spoiled(gradient: torch.Tensor, kind: str, draw: np.random.Generator) -> torch.Tensor:
    bad = gradient.clone()
    if kind.startswith("one"):
        bad.view(-1)[int(draw.integers(bad.numel()))] = BAD[kind]
    else:
        bad[:] = BAD[kind]
    return bad


class Run:
    """A model that is trained with gradients that the test has in its hands."""

    def __init__(self, **fields: Any) -> None:
        self.model = smooth_model()
        compression = Compression.dgc(0.02, min_numel=16, bucket_bytes=12_000, **fields)
        self.optimizer = DistributedOptimizer(momentum_sgd(self.model), self.model.named_parameters(), compression)

    def step(self, gradients: list[torch.Tensor]) -> None:
        """A step with these gradients, through the hooks."""
        self.optimizer.zero_grad()
        sum((p * g).sum() for p, g in zip(self.model.parameters(), gradients, strict=True)).backward()
        self.optimizer.step()

    def skip(self, gradients: list[torch.Tensor]) -> None:
        """A step that sends and applies nothing; u and v take the gradients in, by NumPy."""
        record = self.optimizer.residual_state_dict()
        for (name, _), gradient in zip(self.model.named_parameters(), gradients, strict=True):
            parts, g = record["tensors"][name], gradient.reshape(-1).numpy()
            if "u" in parts:
                parts["u"] = torch.from_numpy(np.float32(MOMENTUM) * parts["u"].numpy() + g)
                g = parts["u"].numpy()
            parts["v"] = torch.from_numpy(parts["v"].numpy() + g)
        record["step"] += 1
        self.optimizer.load_residual_state_dict(record)

    def bits(self) -> list[str]:
        """Of weights, u and v."""
        tensors = kept_by(self.optimizer).tensors
        kept = b"".join(x.tobytes() for name in sorted(tensors) for _, x in sorted(tensors[name].items()))
        return [fingerprint(self.model), hashlib.sha256(kept).hexdigest()]


def not_finite() -> dict[str, Any]:
    """One rank's gradient is spoiled at one step; the run goes on as the reference does."""
    hvd.init()
    found = {}
    for number, kind in enumerate(BAD):
        common, own = np.random.default_rng(number), np.random.default_rng(100 * number + hvd.rank())
        at, rank = int(common.integers(3, STEPS - 6)), int(common.integers(hvd.size()))
        spoiled, reference = Run(), Run()
        tensor = int(common.integers(len(list(spoiled.model.parameters()))))
        same, weights_before = [], ""
        for step, (x, y) in enumerate(batches(STEPS, hvd.rank())):
            gradients = _gradients(reference.model, x, y)
            bad = list(gradients)
            if step == at and hvd.rank() == rank:
                bad[tensor] = _spoiled(gradients[tensor], kind, own)
                gradients[tensor] = torch.nan_to_num(bad[tensor], 0, 0, 0)
            if step == at:
                weights_before = fingerprint(spoiled.model)
                reference.skip(gradients)
            else:
                reference.step(gradients)
            spoiled.step(bad)
            if step == at:
                same.append(fingerprint(spoiled.model) == weights_before)
            if step >= at:
                same.append(spoiled.bits() == reference.bits())
        tensors = kept_by(spoiled.optimizer).tensors
        finite = all(np.isfinite(x).all() for arrays in tensors.values() for x in arrays.values())
        found[kind] = {"same": same, "finite": finite, "fingerprint": fingerprint(spoiled.model), "at": [at, rank]}
    return found


def spoilt_weights() -> dict[str, str]:
    """What is said of weights that are not finite: an optimizer has made them, or a script; also with local steps."""
    hvd.init()
    compressions = {
        "made": Compression.dgc(0.05, min_numel=16),
        "had": Compression.dgc(0.05, min_numel=16, on_nonfinite="stop"),
        "local": Compression.local(2),
    }
    found = {}
    for name, compression in compressions.items():
        model = smooth_model()
        plain = (Dividing if name == "made" else torch.optim.SGD)(model.parameters(), lr=0.05)
        optimizer = DistributedOptimizer(plain, model.named_parameters(), compression=compression)
        if name != "made":
            model[2].weight.data[3, 4] = torch.nan
        with messages() as said:
            found[name] = error_of(lambda model=model, optimizer=optimizer: train(model, optimizer, 1))
        found[name] += "; ".join(text for text in said if "weights" in text)
    return found


def stops() -> dict[str, Any]:
    """A job that is to stop where a gradient is not finite."""
    hvd.init()
    run = Run(on_nonfinite="stop")
    for step, (x, y) in enumerate(batches(STEPS, hvd.rank())):
        gradients = _gradients(run.model, x, y)
        if (step, hvd.rank()) == (7, 1):
            gradients[2][3, 4] = np.nan
        try:
            run.step(gradients)
        except NotFinite as error:
            return {"error": str(error), "step": step}
    return {"error": "", "step": STEPS}


def for_long() -> dict[str, Any]:
    """One rank's gradients are not finite at most steps; then at all under a GradScaler, which is to go on."""
    hvd.init()
    found: dict[str, Any] = {}
    with messages() as texts:
        run = Run(max_skipped=12)
        for step, (x, y) in enumerate(batches(STEPS, hvd.rank())):
            gradients = _gradients(run.model, x, y)
            if step >= 3 and step != 5 and hvd.rank() == 1:
                gradients[2][3, 4] = np.nan
            found["stops"] = [step, error_of(lambda gradients=gradients: run.step(gradients))]
            if found["stops"][1]:
                break
    found |= {
        "said": [text for text in texts if "not finite" in text],
        "skips": run.optimizer.compression_stats()["skipped"],
    }
    with messages() as texts:
        scaler, model = torch.amp.GradScaler("cpu", init_scale=2.0**20), smooth_model()
        compression = Compression.dgc(0.02, min_numel=16, max_skipped=12)
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression, grad_scaler=scaler)
        for x, y in batches(STEPS, hvd.rank()):
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.mse_loss(model(x), y) * (np.nan if hvd.rank() == 1 else 1)).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
    told = [text for text in texts if "not finite" in text]
    return {**found, "scaled": [optimizer.compression_stats()["skipped"], scaler.get_scale(), told]}
