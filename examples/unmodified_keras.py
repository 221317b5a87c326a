"""A Keras script as users of Horovod write them: it knows nothing of dgc_horovod.

    dgcrun -np 2 --dgc --density 0.01 python examples/unmodified_keras.py

``model.fit`` with Horovod's own callbacks, or with ``--tape`` the loop of Horovod's examples for TensorFlow 2. Under
Keras 3 plain ``horovodrun`` can run neither; ``dgcrun`` can, dense (``--compression none``) or compressed.
scikit-learn's digits: 1,797 images of 8x8.
"""

import argparse

import horovod.tensorflow
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

TEST_IMAGES = 597
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

parser = argparse.ArgumentParser(description="Train a small convolutional net on digits.")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true", help="exchange gradients as fp16")
parser.add_argument("--tape", action="store_true", help="a loop with DistributedGradientTape in place of model.fit")
parser.add_argument("--clip", help="clipnorm, global_clipnorm or clipvalue of the optimizer; script: of the loop's own")
parser.add_argument("--limit", type=float, default=0.5, help="of --clip")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", help="every rank writes its weights to SAVE.RANK.npz")


def digits():
    """The images for training and those for testing: the same split in every run."""
    data = load_digits()
    order = np.random.default_rng(2018).permutation(len(data.images))
    images = (data.images.astype(np.float32) / 16)[order, :, :, None]
    images, labels = images - images.mean(), data.target[order]
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), (images[:TEST_IMAGES], labels[:TEST_IMAGES])


def make_model():
    """Two convolutions and two dense layers."""
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(512, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def fit(model, optimizer, images, labels, args):
    """Train with model.fit."""
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    model.compile(optimizer=optimizer, loss=LOSS)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateScheduleCallback(
            args.lr, 0.1, start_epoch=args.epochs // 2, momentum_correction=False
        ),
    ]
    model.fit(images, labels, batch_size=args.batch_size, epochs=args.epochs, callbacks=callbacks, verbose=0)


def loop(model, optimizer, images, labels, args):
    """Train with a tape: broadcasts after the first step, when the optimizer has its variables."""

    @tf.function
    def training_step(x, y, first_batch):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        tape = horovod.tensorflow.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        if args.clip == "script":
            gradients, _ = tf.clip_by_global_norm(gradients, args.limit)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            horovod.tensorflow.broadcast_variables(model.variables, root_rank=0)
            horovod.tensorflow.broadcast_variables(optimizer.variables, root_rank=0)

    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images)).batch(args.batch_size)
    for epoch in range(args.epochs):
        if epoch == args.epochs // 2:
            optimizer.learning_rate = args.lr / 10
        for batch, (x, y) in enumerate(data):
            training_step(x, y, epoch == batch == 0)


def main():
    """Train on all ranks and report from rank 0."""
    args = parser.parse_args()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(1000 * args.seed + hvd.rank())
    (images, labels), test = digits()
    each = len(images) // hvd.size()
    mine = slice(hvd.rank() * each, (hvd.rank() + 1) * each)

    model = make_model()
    own = {args.clip: args.limit} if args.clip not in (None, "script") else {}
    optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9, nesterov=True, **own)
    (loop if args.tape else fit)(model, optimizer, images[mine], labels[mine], args)
    accuracy = np.mean(model.predict(test[0], verbose=0).argmax(1) == test[1])
    if args.save:
        np.savez(f"{args.save}.{hvd.rank()}.npz", *model.get_weights())
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
