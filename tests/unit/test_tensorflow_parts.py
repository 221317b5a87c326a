"""Parts of the TensorFlow adapter that need no ranks: memory that is shared, presets, sparse gradients, slots."""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here; run scripts/build_horovod")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.arithmetic import SGD, Adam, Arithmetic
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.kernels.torch_eager import TorchEagerKernels
from dgc_horovod.stats import ExchangeStats
from dgc_horovod.tensorflow.gradients.paths import Blocks
from dgc_horovod.tensorflow.gradients.transport import host_call
from dgc_horovod.tensorflow.keras import callbacks
from dgc_horovod.tensorflow.settings import Compression, Settings, make_settings
from dgc_horovod.tensorflow.updates import Holder, SlotOwnership, update_of
from dgc_horovod.tensorflow.variables import combined, key_of, kind_of, sources_of, weights_of, zeros_for


def memory_of(tensor):
    return np.from_dlpack(tensor).ctypes.data


def test_a_gradient_reaches_the_kernels_without_a_copy():
    seen = []

    @tf.function
    def run(gradient):
        seen.clear()
        return host_call(lambda g: [np.bool_(seen.append(g.ctypes.data) is None)], [gradient], [tf.bool])

    gradient = tf.random.normal((1000,))
    run(gradient)
    assert seen == [memory_of(gradient)]


def test_an_update_reaches_tensorflow_without_a_copy():
    blocks, given = Blocks([1000, 3, 64]), []

    @tf.function
    def run():
        def update():
            arrays = blocks.take()
            given.append([array.ctypes.data for array in arrays])
            return arrays

        return host_call(update, [], [tf.float32] * 3)

    assert [memory_of(tensor) for tensor in run()] == given[-1]


def test_tensors_by_dlpack_share_memory_both_ways():
    torch = pytest.importorskip("torch")
    kernels, seen = TorchEagerKernels("cpu"), []

    @tf.function
    def run(gradient):
        def twice(g):
            assert isinstance(g, torch.Tensor)
            result = g * 2
            seen.append((g.data_ptr(), result.data_ptr()))
            return [result, np.bool_(True)]

        return host_call(twice, [gradient], [tf.float32, tf.bool], kernels)

    gradient = tf.random.normal((1000,))
    result, flag = run(gradient)
    assert seen[-1][0] == memory_of(gradient)
    np.testing.assert_array_equal(result, 2 * gradient.numpy())
    assert bool(flag)


def test_memory_is_used_again_only_when_nobody_holds_it():
    blocks, held = Blocks([1000]), []

    @tf.function
    def run(value):
        def update(value):
            (array,) = blocks.take()
            array.fill(value)
            return [array]

        return host_call(update, [value], [tf.float32])[0]

    for step in range(20):
        result = run(tf.constant(float(step)))
        assert np.all(result.numpy() == step)
        if step % 5 == 0:
            held.append((step, result))
    for step, result in held:
        assert np.all(result.numpy() == step), "a result that is held was overwritten"
    assert len(blocks._blocks) <= len(held) + 3, "memory is not used again"


def test_rows_that_repeat_are_added():
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 1, 3]), tf.constant([5, 1]))
    once = combined(slices)
    assert once.indices.numpy().tolist() == [3, 1] and once.values.numpy().ravel().tolist() == [5.0, 2.0]
    assert (kind_of(once), kind_of(None), kind_of(once.values)) == ("sparse", "none", "dense")
    (source,) = sources_of([tf.Variable(tf.ones((5, 1)))])
    nothing = zeros_for(source, "sparse")
    assert tf.convert_to_tensor(nothing).numpy().tolist() == [[0.0]] * 5


def test_keras_and_tensorflow_variables_are_one():
    variable = keras.Variable(np.ones(3, "float32"))
    assert key_of(variable) == key_of(variable.value) != key_of(keras.Variable(np.ones(3, "float32")))


class _Buckets:
    """One exchange, as far as an ownership asks it."""

    def __init__(self):
        self.counts, self.cleared = ExchangeStats(1, 1), 0

    def clear(self):
        self.cleared += 1


def _ownership(stride=1, grows=True):
    ownership = SlotOwnership(stride, grows, hvd.ProcessSet([1]))  # of which this process is not the first
    return ownership, ownership.add(Holder([], [], _Buckets()))


def _begins(ownership, holder, iterations):
    """How often u and v were emptied by the begin of a step, and whether it takes the slots over."""
    before = holder.buckets.cleared
    ownership.step_begins(holder, iterations)
    return holder.buckets.cleared - before, holder.begins(own_step=False)


@pytest.mark.parametrize(
    ("seen", "emptied"),
    [([0, 1, 2, 2, 3], [0] * 5), ([0, 1, 9, 10], [0] * 4), ([5, 6, 0], [0, 0, 1]), ([0, 1, 500], [0, 0, 1])],
)
def test_a_checkpoint_is_noticed(seen, emptied):
    ownership, holder = _ownership()
    found = [_begins(ownership, holder, iterations) for iterations in seen]
    assert [count for count, _ in found] == emptied
    assert [takes_over for _, takes_over in found] == [True, *map(bool, emptied[1:])]
    ownership.reloaded()
    assert holder.buckets.cleared == sum(emptied) + 1 and _begins(ownership, holder, seen[-1]) == (0, True)


@pytest.mark.parametrize(
    ("seen", "ends", "grows", "expected"),
    [
        ([4, 5, 5, 6], "applied", True, [0, 0, 1, 0]),  # to go back by one step had not been noticed
        ([4, 5, 5, 6], "skipped", True, [0, 0, 0, 0]),
        ([4, 5, 5, 6], "failed", True, [0, 0, 0, 0]),
        ([4, 5, 5, 6], "applied", False, [0, 0, 0, 0]),
        ([7, 7, 7, 7, 7], "applied", True, [0, 1, 0, 0, 0]),  # a script that sets iterations itself is borne with
    ],
)
def test_the_same_iterations_are_noticed_after_a_step_that_was_applied(seen, ends, grows, expected):
    ownership, holder = _ownership(grows=grows)
    found = []
    for iterations in seen:
        found.append(_begins(ownership, holder, iterations)[0])
        if ends != "failed" or iterations != 5:
            holder.buckets.counts.end_step((0, "") if ends == "skipped" else None)
    assert found == expected


def test_between_two_steps_a_look_goes_on():
    ownership, holder = _ownership()
    for iterations in range(4):
        _begins(ownership, holder, iterations)
        holder.buckets.counts.end_step()
        ownership.look(iterations + 1)
    assert holder.buckets.cleared == 0
    ownership.look(1)
    assert holder.buckets.cleared == 1 and holder.in_slots


def test_an_exchange_right_after_a_resume_is_no_reload():
    """Local steps count the iterations before the last step, which was made before the resume."""
    ownership, holder = _ownership(stride=4, grows=False)
    ownership.resumed(47)
    holder.in_slots = False
    assert [_begins(ownership, holder, iterations) for iterations in (46, 47, 50)] == [(0, False)] * 3


def test_a_step_of_the_optimizers_own_leaves_all_in_the_slots():
    _, holder = _ownership()
    own_steps = (True, True, False, False, True, False)
    assert [holder.begins(own_step) for own_step in own_steps] == [False, False, True, False, False, True]


def test_which_optimizers_are_split():
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            pass

    dgc, topk = Compression.dgc().config, Compression.topk().config
    for kind, config, expected in [
        (keras.optimizers.SGD, dgc, SGD),
        (keras.optimizers.Adam, dgc, Adam),
        (keras.optimizers.AdamW, dgc, Adam),
        (keras.optimizers.SGD, topk, Arithmetic),
        (keras.optimizers.SGD, None, Arithmetic),
        (keras.optimizers.Nadam, dgc, Arithmetic),
        (Own, dgc, Arithmetic),
    ]:
        assert type(update_of(kind(), kind, config).arithmetic) is expected, kind


def test_settings():
    assert Settings(gradient_predivide_factor=4.0).scales == (0.25, 4.0)
    assert Settings(op=hvd.Sum).scales == (1.0, 1.0)
    variables = [tf.Variable(tf.ones(2)) for _ in range(3)]
    stock = {"compression": Compression.none, "num_groups": 0, "groups": None}
    listed = make_settings({**stock, "groups": [[variables[2], variables[0]]]})
    assert listed.group_numbers(sources_of(variables)) == [0, -1, 0]
    assert make_settings({**stock, "num_groups": 2}).group_numbers(sources_of(variables)) == [0, 0, 1]
    for arguments, words in [
        ({"op": hvd.Adasum}, "Average or hvd.Sum"),
        ({"groups": -1}, "groups must be"),
        ({"groups": ["a"]}, "groups must be"),
        ({"groups": [variables[0]]}, "groups must be"),
        ({"gradient_predivide_factor": 0.0}, "positive number"),
        ({"process_set": None}, "must be a hvd.ProcessSet"),
    ]:
        with pytest.raises((ConfigError, UnsupportedUse), match=words):
            make_settings({**stock, **arguments})


def test_a_strategy_that_keras_does_not_have_is_refused():
    given = {"compression": Compression.dgc(), "op": hvd.Average, "num_groups": 0, "groups": None}
    with mock.patch.object(DGCConfig, "strategy", "other"), pytest.raises(UnsupportedUse, match="other is for PyTorch"):
        make_settings(given)


def test_local_variables_are_variables_of_built_layers():
    """What is none was passed over without a word, and broadcast or averaged like all others."""
    built, unbuilt = keras.layers.Dense(3), keras.layers.Dense(3)
    built.build((2,))
    keys = {key_of(weight) for weight in built.weights}
    for given in (built.weights, tuple(built.weights), iter(built.weights), [w.value for w in built.weights]):
        callback = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=given)
        assert callback._local == keys
    callback = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=built.kernel)
    callback.register_local_var(built.bias.value)
    assert callback._local == keys
    for wrong in (built.get_weights(), "kernel", [built.kernel, None], unbuilt, 3):
        with pytest.raises(ConfigError, match="local_variables must be variables of layers that are built"):
            callbacks.BroadcastGlobalVariablesCallback(0, local_variables=wrong)


def test_local_layers_are_built_layers():
    built, unbuilt = keras.layers.Dense(3), keras.layers.Dense(3, name="later")
    built.build((2,))
    assert weights_of(built) == weights_of(iter([built])) == built.weights and weights_of(None) == []
    built.trainable = False
    assert len(weights_of([built])) == 2, "a frozen layer may be trained later"
    with pytest.raises(ConfigError, match="layer 'later' is not built"):
        weights_of([built, unbuilt])
    with pytest.raises(ConfigError, match="must be layers of Keras 3"):
        weights_of([built.kernel])
