"""Image classification with ``model.fit``: a small convolutional net on scikit-learn's digits (1,797 images of 8x8).

    horovodrun -np 2 python examples/keras_digits.py --compression dgc

Shows the two lines that a Keras script of Horovod changes, its callbacks, and a density warm-up in epochs.
"""

from __future__ import annotations

import time
from typing import Any

import common
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, WarmupSchedule, callbacks

TEST_IMAGES = 597
Images = tuple[np.ndarray, np.ndarray]


def digits() -> tuple[Images, Images]:
    """The images for training and those for testing: the same split in every run."""
    data = load_digits()
    order = np.random.default_rng(2018).permutation(len(data.images))
    images = (data.images.astype(np.float32) / 16)[order, :, :, None]
    images, labels = images - images.mean(), data.target[order]
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), (images[:TEST_IMAGES], labels[:TEST_IMAGES])


def shard(images: Images) -> Images:
    """This rank's part; all ranks have equally many, so that they make equally many steps."""
    each = len(images[0]) // hvd.size()
    here = slice(hvd.rank() * each, (hvd.rank() + 1) * each)
    return images[0][here], images[1][here]


def make_model() -> Any:
    """Two convolutions and two dense layers: 155,530 parameters, 99% of them in three matrices."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Train on all ranks and report from rank 0."""
    args = common.arguments(
        "A convolutional net on scikit-learn's digits with model.fit, with gradient compression.",
        density=0.005,
        epochs=60,
        batch_size=32,
        lr=0.1,
        lr_warmup_epochs=2,
        warmup_epochs=3,
    ).parse_args()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1000 * args.seed + hvd.rank())
    train, test = digits()
    images, labels = shard(train)
    steps = -(-len(images) // args.batch_size)
    warm = args.lr_warmup_epochs * steps
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, args.epochs * steps - warm), warmup_target=args.lr, warmup_steps=warm
    )
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=1e-4)

    compression = getattr(Compression, args.compression)
    if args.compression not in common.UNCOMPRESSED:
        warmup = WarmupSchedule(epochs=args.warmup_epochs) if args.warmup_epochs else None
        compression = compression(**common.fields(args), warmup=warmup)
    optimizer = DistributedOptimizer(optimizer, compression=compression)

    model = make_model()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    progress, start = common.Progress(args.epochs, hvd.rank()), time.perf_counter()
    model.fit(
        images,
        labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: progress.advance(logs["loss"])),
        ],
    )
    seconds = time.perf_counter() - start
    sent = common.traffic(optimizer, model.count_params(), args.compression, args.epochs * steps, hvd.size())
    if hvd.rank() == 0:  # the replicas agree
        accuracy = float(np.mean(model.predict(test[0], verbose=0).argmax(1) == test[1]))
        common.report(args, "accuracy", accuracy, seconds, sent)


if __name__ == "__main__":
    main()
