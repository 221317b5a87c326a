"""A training loop of one's own in TensorFlow: the digits of ``keras_digits.py``, a tf.function for each step.

    horovodrun -np 2 python examples/keras_loop.py --compression topk --tape

The optimizer exchanges the gradients (``DistributedOptimizer``), or with ``--tape`` the tape does
(``DistributedGradientTape``); the latter does not know the optimizer's momentum, so ``dgc`` does not correct it there.
"""

from __future__ import annotations

import time
from typing import Any

import common
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras_digits import digits, make_model, shard

from dgc_horovod.tensorflow import (
    Compression,
    DistributedGradientTape,
    DistributedOptimizer,
    WarmupSchedule,
    broadcast_variables,
)


def make_step(model: Any, optimizer: Any, wrap_tape: Any) -> Any:
    """One step on one batch; returns its loss."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = wrap_tape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def main() -> None:
    """Train on all ranks and report from rank 0."""
    parser = common.arguments(
        "A convolutional net on scikit-learn's digits in a loop of its own, with gradient compression.",
        density=0.005,
        epochs=60,
        batch_size=32,
        lr=0.05,
        lr_warmup_epochs=2,
        warmup_epochs=3,
    )
    parser.add_argument("--tape", action="store_true", help="exchange gradients in the tape, not in the optimizer")
    args = parser.parse_args()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1000 * args.seed + hvd.rank())
    train, test = digits()
    images, labels = shard(train)
    model, optimizer = make_model(), keras.optimizers.SGD(args.lr, momentum=0.9)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=args.seed)
    data = data.batch(args.batch_size, drop_remainder=True)
    steps = len(images) // args.batch_size

    compression = getattr(Compression, args.compression)
    if args.compression not in common.UNCOMPRESSED:
        warmup = WarmupSchedule(steps=args.warmup_epochs * steps) if args.warmup_epochs else None
        compression = compression(**common.fields(args), warmup=warmup)

    def wrap_tape(tape: tf.GradientTape) -> Any:
        return DistributedGradientTape(tape, compression=compression) if args.tape else tape

    if not args.tape:
        optimizer = DistributedOptimizer(optimizer, compression=compression)
    optimizer.build(model.trainable_variables)
    broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    step, factor = make_step(model, optimizer, wrap_tape), common.learning_rate(args, steps)
    progress, start, done = common.Progress(args.epochs, hvd.rank()), time.perf_counter(), 0
    for _ in range(args.epochs):
        for batch in data:
            optimizer.learning_rate = args.lr * factor(done)
            loss = step(*batch)
            done += 1
        progress.advance(float(loss))
    seconds = time.perf_counter() - start
    source = wrap_tape(tf.GradientTape()) if args.tape else optimizer
    sent = common.traffic(source, model.count_params(), args.compression, done, hvd.size())
    if hvd.rank() == 0:  # the replicas agree
        accuracy = float(np.mean(model.predict(test[0], verbose=0).argmax(1) == test[1]))
        common.report(args, "accuracy", accuracy, seconds, sent)


if __name__ == "__main__":
    main()
