"""Training that goes on from a backup ends as if it had not been interrupted, to the last bit."""

import functools
import itertools
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, assert_same, data, fresh_model, train
from test_withheld import MODELS as OWN_METHODS
from test_withheld import adversarial

import accumloop

x, labels, targets, weights = data()
L = keras.layers
HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    ("kind", "data_of", "kills"),
    [
        ("keras", "finite", 20),
        ("batches", "finite", 20),
        ("epoch", "generator", 3),
        ("batches", "endless", 4),
        ("keras", "endless", 3),
    ],
)
def test_killed_at_random_and_started_again(kind, data_of, kills):
    run = subprocess.run(
        [sys.executable, HERE / "resume.py", kind, data_of, str(kills), "1"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(HERE.parent), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert run.stdout == f"equal after {kills}\n", run.stderr[-3000:]


class Interrupt(keras.callbacks.Callback):
    def __init__(self, update):
        super().__init__()
        self.left = update

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def make_model(**options):
    model = keras.Sequential([keras.Input([5]), L.Dense(4, activation="tanh"), L.Dropout(0.3)])
    model.add(L.Dense(2))
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"], **options)
    return model


def make_ds():
    ds = tf.data.Dataset.from_tensor_slices((x, targets)).shuffle(9, seed=2)
    return ds.batch(5)


CASE = Case(make_model, make_ds)  # 5 updates an epoch


def interrupted(case, update, path, accum=3, save_freq=2, **more):
    """Train, interrupted after an update, and again."""
    backup = functools.partial(accumloop.BackupAndRestore, path, save_freq)
    others = more.pop("others", list)
    with pytest.raises(KeyboardInterrupt):
        train(case, accum, callbacks=lambda: [*others(), backup(), Interrupt(update)], **more)
    assert list(path.iterdir())
    return train(case, accum, callbacks=lambda: [*others(), backup()], **more)


def assert_goes_on(whole, actual, epoch):
    """Assert that a run has begun in an epoch and ended as the one without interruption."""
    assert actual.epochs == whole.epochs[epoch:]
    wanted = {name: values[epoch:] for name, values in whole.history.items()}
    assert actual.history == wanted
    assert actual.iterations == whole.iterations
    for name in ("weights", "optimizer"):
        for got, value in zip(
            getattr(actual, name).values(), getattr(whole, name).values(), strict=True
        ):
            np.testing.assert_array_equal(got, value)


class Counts(keras.Sequential):
    """A number that is no Keras variable."""

    def __init__(self, layers):
        super().__init__(layers)
        self.state = {"seen": tf.Variable(0, trainable=False)}

    def train_step(self, batch):
        self.state["seen"].assign_add(1)
        return super().train_step(batch) | {"seen": tf.cast(self.state["seen"], "float64")}


def counting():
    model = Counts([keras.Input([5]), L.Dense(2)])
    model.compile("sgd", "mse")
    return model


def averaging():
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8), "mse")
    return model


def scaling():
    model = make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=8.0, dynamic_growth_steps=3
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def unbuilt():
    model = keras.Sequential([L.Dense(4), L.BatchNormalization(), L.Dropout(0.3), L.Dense(2)])
    model.compile("adam", "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
    return model


MODELS = {
    "plain": make_model,
    "eager": functools.partial(make_model, run_eagerly=True),
    "unbuilt": unbuilt,
    "two_optimizers": adversarial,
    "nested_logs": OWN_METHODS["loops_over_metrics"][0],
    "moving_average": averaging,
    "loss_scale": scaling,
}


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_in_the_middle_of_an_epoch(model, accum, tmp_path):
    case = Case(MODELS[model], make_ds)
    whole = train(case, accum)
    assert_goes_on(whole, interrupted(case, 8, tmp_path, accum), epoch=1)


def test_a_variable_that_keras_does_not_know(tmp_path):
    case = Case(counting, make_ds)
    assert_goes_on(train(case, 1), interrupted(case, 8, tmp_path, 1), epoch=1)


DATA = {
    "endless": (lambda: endless().batch(5), {"steps_per_epoch": 4}),
    "two_repetitions": (lambda: make_ds().repeat(2), {"steps_per_epoch": 3, "epochs": 3}),
    "unknown_length": (lambda: make_ds().filter(lambda *_: True), {}),
    "unknown_and_endless": (
        lambda: endless().filter(lambda *_: True).batch(5),
        {"steps_per_epoch": 4},
    ),
    "class_weight": (
        lambda: tf.data.Dataset.from_tensor_slices((x, labels)).shuffle(9, seed=2).batch(5),
        {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    ),
}


def endless():
    return tf.data.Dataset.from_tensor_slices((x, targets)).shuffle(9, seed=2).repeat()


def make_classes():
    model = keras.Sequential([keras.Input([5]), L.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("update", [5, 8])
@pytest.mark.parametrize("name", DATA)
def test_data(name, update, tmp_path):
    ds, arguments = DATA[name]
    make = make_classes if name == "class_weight" else make_model
    case = Case(make, ds, {"epochs": 4, **arguments})
    whole = train(case, 3)
    begun = (update // 2 * 2 - 1) // (arguments.get("steps_per_epoch") or 5)
    assert_goes_on(whole, interrupted(case, update + 1, tmp_path), epoch=begun)


@pytest.mark.xfail(
    strict=True,
    reason="TensorFlow 2.21 restores a shuffle that has reached the end of its input, and is made "
    "anew for each repetition, with one seed too many",
)
def test_a_shuffle_that_is_repeated_behind_batches(tmp_path):
    case = Case(make_model, lambda: make_ds().repeat(), {"epochs": 4, "steps_per_epoch": 4})
    assert_goes_on(train(case, 3), interrupted(case, 6, tmp_path), epoch=0)


def test_save_freq_counts_batches(tmp_path):
    """And neither micro-batches nor calls of the step: 3 micro-batches, 2 batches in a call."""

    class Looks(keras.callbacks.Callback):
        seen = ()

        def on_train_batch_end(self, batch, logs=None):
            self.seen += (sorted(path.name for path in tmp_path.iterdir()),)

    case = Case(functools.partial(make_model, steps_per_execution=2), make_ds)
    looks = Looks()
    backup = accumloop.BackupAndRestore(tmp_path, save_freq=4, delete_checkpoint=False)
    train(case, 3, epochs=2, callbacks=lambda: [looks, backup])
    # Told before the backup of the same batch: after batches 4 and 8 of 12 in calls of 2.
    counts = [len(names) for names in looks.seen]
    assert counts == [0, 0, 1, 1, 2, 2]


def test_state_of_callbacks(tmp_path):
    def others():
        return [
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9.0, cooldown=1),
            keras.callbacks.EarlyStopping(
                "mae", min_delta=9.0, patience=4, restore_best_weights=True
            ),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "best.keras", save_best_only=True, monitor="mae", mode="max"
            ),
        ]

    case = Case(make_model, make_ds, {"epochs": 9})
    whole = train(case, 3, callbacks=others)
    assert len(whole.epochs) < 9, "it is not stopped"
    backups = tmp_path / "backups"
    actual = interrupted(case, 13, backups, others=others)
    assert_goes_on(whole, actual, epoch=2)


def test_a_run_that_was_about_to_stop(tmp_path):
    """Killed between the end of its last epoch and its own."""

    class Dies(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise KeyboardInterrupt

    def others():
        return [keras.callbacks.EarlyStopping("mae", min_delta=9.0, patience=1)]

    def backup():
        return accumloop.BackupAndRestore(tmp_path)

    case = Case(make_model, make_ds, {"epochs": 9})
    whole = train(case, 3, callbacks=others)
    assert whole.epochs == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        train(case, 3, callbacks=lambda: [*others(), backup(), Dies()])
    assert_goes_on(whole, train(case, 3, callbacks=lambda: [*others(), backup()]), epoch=1)


def test_moving_averages_in_the_model(tmp_path):
    def others():
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

    case = Case(averaging, make_ds)
    whole = train(case, 3, callbacks=others)
    for save_freq, update in ((5, 6), (2, 8)):
        path = tmp_path / str(save_freq)
        path.mkdir()
        actual = interrupted(case, update, path, save_freq=save_freq, others=others)
        assert actual.iterations == whole.iterations
        for got, wanted in zip(actual.weights.values(), whole.weights.values(), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_rate_that_each_epoch_changes(tmp_path):
    """Not a second time, when the epoch is begun again in its middle."""

    def others():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]

    whole = train(CASE, 3, callbacks=others)
    assert_goes_on(whole, interrupted(CASE, 8, tmp_path, others=others), epoch=1)


def test_random_numbers_of_python_and_numpy(tmp_path):
    def others():
        def disturb(batch, logs):
            kernel = model().layers[0].kernel
            kernel.assign(kernel + np.random.normal() * 0.01)

        callback = keras.callbacks.LambdaCallback(on_train_batch_begin=disturb)
        model = lambda: callback.model  # noqa: E731
        return [callback]

    whole = train(CASE, 3, callbacks=others)
    assert_goes_on(whole, interrupted(CASE, 8, tmp_path, others=others), epoch=1)


def test_a_run_that_has_ended_leaves_nothing(tmp_path):
    path = tmp_path / "new" / "backup"
    outcome = train(CASE, 3, callbacks=lambda: [accumloop.BackupAndRestore(path)])
    assert_same(train(CASE, 3), outcome, rtol=0)
    assert not path.exists()


def test_what_else_is_in_the_directory_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    train(CASE, 3, callbacks=lambda: [accumloop.BackupAndRestore(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_fit_after_it_is_whole(tmp_path):
    model = fresh_model(CASE)
    backup = accumloop.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        accumloop.train(model, make_ds(), 3, epochs=3, verbose=0, callbacks=[backup, Interrupt(8)])
    backup = accumloop.BackupAndRestore(tmp_path)
    history = accumloop.train(model, make_ds(), 3, epochs=3, verbose=0, callbacks=[backup])
    assert history.epoch == [1, 2]
    assert model.fit(make_ds(), epochs=2, shuffle=False, verbose=0).epoch == [0, 1]


def test_a_backup_of_a_run_that_was_finished_is_told_of_its_end(tmp_path):
    def backup():
        return [accumloop.BackupAndRestore(tmp_path, delete_checkpoint=False)]

    whole = train(CASE, 3, callbacks=backup)
    again = train(CASE, 3, callbacks=backup)
    assert again.epochs == []
    assert again.events[-1][1] == {name: values[-1] for name, values in whole.history.items()}
    for got, wanted in zip(again.weights.values(), whole.weights.values(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def newest(path):
    return max(path.glob("backup-*"), key=lambda found: int(found.name[7:]))


def cut_short(path):
    file = next(newest(path).glob("variables.data*"))
    file.write_bytes(file.read_bytes()[:-1])


def change_a_byte(path):
    file = next(newest(path).glob("variables.data*"))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def lose_a_file(path):
    (newest(path) / "state.json").unlink()


def lose_the_manifest(path):
    (newest(path) / "manifest.json").unlink()


def cut_the_manifest(path):
    (newest(path) / "manifest.json").write_text("{")


def write_half(path):
    """As it is while a backup is being written."""
    newest(path).rename(path / "partial-9")


def stopped(path, update, **arguments):
    callbacks = [accumloop.BackupAndRestore(path, **arguments), Interrupt(update)]
    with pytest.raises(KeyboardInterrupt):
        train(CASE, 3, callbacks=lambda: callbacks)


@pytest.mark.parametrize(
    "damage", [cut_short, change_a_byte, lose_a_file, lose_the_manifest, cut_the_manifest]
)
def test_a_damaged_backup_is_not_loaded_but_the_one_before(damage, tmp_path):
    stopped(tmp_path, 14, save_freq=2)
    damage(tmp_path)
    with pytest.warns(UserWarning, match=r"damaged.*backup-6.*the one before.*backup-5"):
        actual = train(CASE, 3, callbacks=lambda: [accumloop.BackupAndRestore(tmp_path, 2)])
    assert_goes_on(train(CASE, 3), actual, epoch=1)


def test_a_backup_that_is_half_written_is_not_loaded(tmp_path):
    stopped(tmp_path, 14, save_freq=2)
    write_half(tmp_path)
    actual = train(CASE, 3, callbacks=lambda: [accumloop.BackupAndRestore(tmp_path, 2)])
    assert_goes_on(train(CASE, 3), actual, epoch=1)
    assert not tmp_path.exists()


def test_only_damaged_backups_are_an_error(tmp_path):
    stopped(tmp_path, 3, save_freq=2)
    cut_short(tmp_path)
    with pytest.raises(ValueError, match=r"All backups are damaged.*remove the directory"):
        train(CASE, 3, callbacks=lambda: [accumloop.BackupAndRestore(tmp_path, 2)])


def wider():
    model = keras.Sequential([keras.Input([5]), L.Dense(8, activation="tanh"), L.Dropout(0.3)])
    model.add(L.Dense(2))
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def with_another_optimizer():
    model = make_model()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (wider, r"shape \(5, 4\).*where the model has.*shape \(5, 8\)"),
        (with_another_optimizer, "another model or optimizer"),
    ],
)
def test_a_backup_of_another_model_is_an_error(other, message, tmp_path):
    stopped(tmp_path, 8, save_freq=2)
    case = Case(other, make_ds)
    before = [v.numpy() for v in fresh_model(case).weights]
    model = fresh_model(case)
    with pytest.raises(ValueError, match=message):
        accumloop.train(
            model, make_ds(), 3, verbose=0, callbacks=[accumloop.BackupAndRestore(tmp_path)]
        )
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("size", [3, 10])
def test_a_backup_of_another_dataset_is_an_error(size, tmp_path):
    stopped(tmp_path, 8, save_freq=2)
    case = Case(make_model, lambda: tf.data.Dataset.from_tensor_slices((x, targets)).batch(size))
    with pytest.raises(ValueError, match=r"of another dataset.*of 5 batches"):
        train(case, 3, callbacks=lambda: [accumloop.BackupAndRestore(tmp_path, 2)])


def random_rows():
    rng = np.random.default_rng()
    for _ in range(23):
        yield rng.normal(size=5), rng.normal(size=2)


def test_data_that_cannot_be_found_again_is_warned_of(tmp_path):
    spec = (tf.TensorSpec([5], tf.float64), tf.TensorSpec([2], tf.float64))
    case = Case(
        make_model,
        lambda: tf.data.Dataset.from_generator(random_rows, output_signature=spec).batch(5),
    )
    with pytest.warns(UserWarning, match="examples are left out or repeated"):
        outcome = interrupted(case, 8, tmp_path)
    assert outcome.epochs == [1, 2]


def test_a_shuffle_without_a_seed_goes_on_in_its_order(tmp_path):
    """No row twice in the epoch that was interrupted, and none left out."""
    seen = []

    class Rows(keras.Sequential):
        def train_step(self, batch):
            tf.numpy_function(lambda rows: seen.append(rows[:, 0].tolist()), [batch[0]], [])
            return super().train_step(batch)

    def make_recording():
        model = Rows([keras.Input([5]), L.Dense(2)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
        return model

    def unseeded():
        rows = np.arange(23.0)
        tf.random.set_seed(np.random.default_rng().integers(1 << 30))
        ds = tf.data.Dataset.from_tensor_slices(
            (np.tile(rows[:, None], [1, 5]), np.tile(rows[:, None], [1, 2]))
        )
        return ds.shuffle(23).batch(5)

    case = Case(make_recording, unseeded, {"epochs": 1})
    backup = functools.partial(accumloop.BackupAndRestore, tmp_path, 2)
    with pytest.raises(KeyboardInterrupt):
        train(case, 1, callbacks=lambda: [backup(), Interrupt(3)])
    before = list(itertools.chain(*seen[:2]))  # Two batches were saved, the third was not.
    seen.clear()
    train(case, 1, callbacks=lambda: [backup()])
    assert sorted([*before, *itertools.chain(*seen)]) == list(range(23))


def test_other_callbacks_begin_anew_and_it_is_said(tmp_path):
    stopped(tmp_path, 8, save_freq=2)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    with pytest.warns(UserWarning, match=r"callbacks are others.*EarlyStopping"):
        train(CASE, 3, callbacks=lambda: [stopping, accumloop.BackupAndRestore(tmp_path, 2)])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backup_dir": ""}, ValueError, "Empty `backup_dir`"),
        ({"backup_dir": None}, ValueError, "Empty `backup_dir`"),
        ({"backup_dir": "b", "save_freq": 0}, ValueError, "at least 1"),
        ({"backup_dir": "b", "save_freq": True}, TypeError, '"epoch" or an int'),
        ({"backup_dir": "b", "save_freq": "batch"}, TypeError, '"epoch" or an int'),
    ],
)
def test_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        accumloop.BackupAndRestore(**arguments)


def test_it_is_not_for_fit(tmp_path):
    model = fresh_model(CASE)
    for callbacks in ([], [accumloop.Accumulate(3)]):
        backup = accumloop.BackupAndRestore(tmp_path)
        with pytest.raises(ValueError, match=r"is for `accumloop\.train`"):
            model.fit(make_ds(), shuffle=False, callbacks=[*callbacks, backup])


def test_two_of_them_are_an_error(tmp_path):
    two = [accumloop.BackupAndRestore(tmp_path / name) for name in "ab"]
    with pytest.raises(ValueError, match="Only one `BackupAndRestore`"):
        train(CASE, 3, callbacks=lambda: two)


def test_it_is_one_of_keras(tmp_path):
    assert isinstance(accumloop.BackupAndRestore(tmp_path), keras.callbacks.BackupAndRestore)
