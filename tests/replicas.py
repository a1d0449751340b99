"""A GradientAccumulator in two replicas with 7 and 3 rows, against fit on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import accumloop

keras.config.set_floatx("float64")
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
rng = np.random.default_rng(0)
x = rng.integers(0, 6, [20, 4])
y = rng.normal(size=[20, 2])


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Embedding(6, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = make()
    model.optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.MeanSquaredError()
    accumulator = accumloop.GradientAccumulator(model.trainable_variables)


@tf.function
def update(features, wanted):
    def replica(features, wanted):
        accumulator.reset()
        for start in tf.range(0, tf.shape(features)[0], 3):
            part = features[start : start + 3]
            with tf.GradientTape() as tape:
                y_pred = model(part, training=True)
                loss = tf.reduce_mean(
                    keras.losses.mean_squared_error(wanted[start : start + 3], y_pred)
                )
            gradients = tape.gradient(loss, model.trainable_variables)
            accumulator.add(gradients, weight=tf.shape(part)[0])
        model.optimizer.apply(accumulator.value(), model.trainable_variables)

    strategy.run(replica, (features, wanted))


def uneven(array, start):
    rows = [array[start : start + 7], array[start + 7 : start + 10]]
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(rows[context.replica_id_in_sync_group])
    )


for _ in range(3):
    for start in (0, 10):
        update(uneven(x, start), uneven(y, start))

one = make()
one.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(10), epochs=3, shuffle=False, verbose=0)
for got, wanted in zip(model.get_weights(), one.get_weights(), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
assert int(keras.ops.convert_to_numpy(model.optimizer.iterations.value)) == 6

for call in (accumulator.value, accumulator.reset, lambda: accumulator.add([])):
    with pytest.raises(RuntimeError, match=r"the function that `strategy\.run` runs"):
        call()
print("equal")
