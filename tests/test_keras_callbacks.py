"""Every callback of Keras, and the kinds that others write, has its result under each door."""

import csv
import functools
import http.server
import importlib.util
import io
import json
import pathlib
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, accumulate, assert_same, batches, data, fit, train
from tensorflow.core.util import event_pb2
from tqdm.keras import TqdmCallback

x, labels, targets, weights = data()
L, C = keras.layers, keras.callbacks
VALIDATION = (x[:9], targets[:9])
DOORS = {
    "train": functools.partial(train, accum=3),
    "accumulate": functools.partial(accumulate, accum=3),
}


def make_model(**options):
    model = keras.Sequential([keras.Input([5]), L.Dense(4, activation="tanh"), L.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **options)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


CASE = Case(
    make_model,
    functools.partial(batches, x, targets, size=5),
    {"validation_data": VALIDATION, "epochs": 4},
)
AVERAGING = Case(
    functools.partial(make_model, use_ema=True, ema_momentum=0.8), CASE.make_ds, CASE.arguments
)
DIVERGING = Case(
    functools.partial(make_model, clipvalue=1e200),
    lambda: batches(np.where(np.arange(23)[:, None] < 12, x, np.inf), targets, size=5),
    {"epochs": 2},
)


def attributes(*names):
    return lambda callback, path: {name: getattr(callback, name) for name in names}


def csv_of(callback, path):
    with (path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items()} for row in rows]


def files_of(callback, path):
    """What each saved file holds, by its name."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.suffix == ".keras":
            found[file.name] = keras.models.load_model(file).get_weights()
        elif file.suffix == ".h5":
            model = CASE.make_model()
            model.optimizer.build(model.trainable_variables)
            model.load_weights(file)
            found[file.name] = [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]
        elif file.suffix == ".json" and file.name != "accumloop.json":  # The seeds are beside it.
            found[file.name] = json.loads(file.read_text())
    assert found
    return found


def events_of(callback, path):
    """The summaries of real event files: scalars as numbers, others by their shape and sum."""
    found = {}
    for file in sorted(path.rglob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(file)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                name = f"{file.parent.name}/{value.tag}"
                if "per_second" in name:
                    found[name, event.step] = "a speed"
                    continue
                array = tf.make_ndarray(value.tensor)
                found[name, event.step] = "text" if array.dtype == object else array
            if event.HasField("graph_def"):
                found[f"{file.parent.name}/graph", event.step] = "a graph"
    assert found
    assert any(file.stat().st_size for file in path.rglob("*tfevents*"))
    return {name: found[name] for name in sorted(found)}


def profiled(callback, path):
    graph_of_the_step = [name for name, _ in events_of(callback, path) if name.endswith("graph")]
    return graph_of_the_step, bool(list(path.rglob("*.xplane.pb")))


class Server:
    """A loopback server that keeps what RemoteMonitor posts."""

    def __init__(self, path):
        posted = self.posted = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{self.server.server_port}"
        self.callback = C.RemoteMonitor(root=root, send_as_json=True)
        self.callback.server = self


def posts_of(callback, path):
    callback.server.server.shutdown()
    callback.server.server.server_close()
    assert len(callback.server.posted) == 4
    return callback.server.posted


class Stop(C.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.stop_training = True


class HalveLearningRate(C.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 if batch % 2 else 0.05


class Evaluate(C.Callback):
    """Evaluates and predicts in the middle of an epoch, which resets the metrics under fit too."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.seen.append(self.model.evaluate(*VALIDATION, verbose=0))
            self.seen.append(self.model.predict(x[:3], verbose=0))


class Freeze(C.Callback):
    """Changes `trainable` in the middle, which only a recompilation heeds."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.layers[0].trainable = batch % 2 == 0


class Recorded(C.Callback):
    """Copies of its parameters, and of the weights at each event."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append(dict(self.params))

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(self.model.get_weights())

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append([int(self.model.optimizer.iterations), *self.model.get_weights()])


def recorded_lambda(path):
    told = []
    hooks = ("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end")
    hooks += ("on_train_batch_begin", "on_train_batch_end")
    callback = C.LambdaCallback(
        **{
            hook: lambda *args, hook=hook, logs=None: told.append((hook, *args[:1], logs))
            for hook in hooks
        }
    )
    callback.told = told
    return callback


def bars_of(callback, path):
    """The numbers of tqdm's finished bars, without times."""
    text = callback.epoch_bar.fp.getvalue()
    return re.findall(r"(\d+/\d+|\d+\.?\d*epoch|\d+batch)", text)


def tqdm_of(verbose):
    options = {"file": io.StringIO(), "ascii": True, "mininterval": 0, "miniters": 1}
    return TqdmCallback(verbose=verbose, bar_format="{n_fmt}/{total_fmt} {postfix}\n", **options)


def early(path, **options):
    return C.EarlyStopping(restore_best_weights=True, **options)


def checkpoint(name, path, **options):
    return C.ModelCheckpoint(str(path / name), **options)


def nothing(callback, path):
    return {}


P = functools.partial
STOPPED = attributes("wait", "best", "best_epoch", "best_weights", "stopped_epoch")
CALLBACKS = {
    "history": (CASE, lambda path: C.History(), attributes("history", "epoch")),
    "csv_logger": (CASE, lambda path: C.CSVLogger(path / "log.csv"), csv_of),
    "remote_monitor": (CASE, lambda path: Server(path).callback, posts_of),
    "early_stopping": (CASE, P(early, monitor="loss", min_delta=10.0, patience=1), STOPPED),
    "early_stopping_baseline": (CASE, P(early, baseline=0.001, patience=2), STOPPED),
    "early_stopping_later": (CASE, P(early, start_from_epoch=2, min_delta=9, patience=0), STOPPED),
    "checkpoint": (CASE, P(checkpoint, "{epoch}-{val_loss:.6f}.keras"), files_of),
    "checkpoint_of_batches": (
        CASE,
        P(checkpoint, "{epoch}-{batch}-{loss:.6f}.weights.h5", save_freq=3, save_weights_only=True),
        files_of,
    ),
    "checkpoint_of_best": (
        CASE,
        P(checkpoint, "best.keras", save_best_only=True, monitor="mae", mode="max"),
        files_of,
    ),
    "backup": (CASE, lambda path: C.BackupAndRestore(path, delete_checkpoint=False), files_of),
    "backup_of_batches": (
        CASE,
        lambda path: C.BackupAndRestore(path, save_freq=3, delete_checkpoint=False),
        files_of,
    ),
    "backup_deleted": (
        CASE,
        lambda path: C.BackupAndRestore(path / "backup"),
        lambda callback, path: list(path.iterdir()),
    ),
    "tensorboard": (
        CASE,
        P(C.TensorBoard, histogram_freq=1, update_freq=1, write_steps_per_second=True),
        events_of,
    ),
    "tensorboard_of_epochs": (CASE, P(C.TensorBoard, update_freq="epoch"), events_of),
    "tensorboard_profile": (CASE, P(C.TensorBoard, profile_batch=(2, 3)), profiled),
    "scheduler": (
        CASE,
        lambda path: C.LearningRateScheduler(lambda epoch, lr: lr * 0.7),
        nothing,
    ),
    "reduce_lr": (
        CASE,
        lambda path: C.ReduceLROnPlateau(factor=0.5, patience=0, min_delta=1.0, cooldown=1),
        attributes("wait", "best", "cooldown_counter"),
    ),
    "terminate_on_nan": (DIVERGING, lambda path: C.TerminateOnNaN(), nothing),
    "swap_ema": (AVERAGING, lambda path: C.SwapEMAWeights(swap_on_epoch=True), nothing),
    "swap_ema_in_validation": (AVERAGING, lambda path: C.SwapEMAWeights(), nothing),
    "lambda": (CASE, recorded_lambda, attributes("told")),
    "stop_in_an_epoch": (CASE, lambda path: Stop(), nothing),
    "learning_rate": (CASE, lambda path: HalveLearningRate(), nothing),
    "evaluate": (CASE, lambda path: Evaluate(), attributes("seen")),
    "freeze": (CASE, lambda path: Freeze(), nothing),
    "recorded": (CASE, lambda path: Recorded(), attributes("seen")),
    "tqdm": (CASE, lambda path: tqdm_of(1), bars_of),
    "tqdm_with_a_bar_of_each_epoch": (CASE, lambda path: tqdm_of(2), bars_of),
}
if importlib.util.find_spec("orbax"):
    CALLBACKS["orbax"] = (
        CASE,
        lambda path: C.OrbaxCheckpoint(directory=str(path), save_freq="epoch"),
        lambda callback, path: sorted(
            str(file.relative_to(path)) for file in path.glob("*") if file.name.isdigit()
        ),
    )


def assert_close(actual, expected, name):
    if isinstance(expected, dict):
        assert list(actual) == list(expected), name
        for key, value in expected.items():
            assert_close(actual[key], value, f"{name}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), name
        for index, value in enumerate(expected):
            assert_close(actual[index], value, f"{name}[{index}]")
    elif expected is None or isinstance(expected, str | pathlib.Path):
        assert actual == expected, name
    else:
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.dtype == expected.dtype, name
        # Summaries are float32.
        rtol = 1e-9 if expected.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-12, err_msg=name)


@pytest.fixture(scope="module")
def under_fit(tmp_path_factory):
    """What each callback does under fit, once for all doors."""

    @functools.cache
    def run(name):
        return observed(fit, name, tmp_path_factory.mktemp("fit"))

    return run


def observed(door, name, path):
    case, make, observe = CALLBACKS[name]
    made = []

    def callbacks():
        made.append(make(path))
        return made

    outcome = door(case, callbacks=callbacks)
    return outcome, observe(made[0], path)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CALLBACKS)
def test_results_are_those_under_fit(name, door, under_fit, tmp_path):
    expected, seen = under_fit(name)
    actual, got = observed(DOORS[door], name, tmp_path)
    assert_same(expected, actual)
    assert_close(got, seen, name)


def test_every_callback_of_keras_is_here():
    """So that one which a newer Keras ships is added."""
    shipped = {
        name
        for name, value in vars(C).items()
        if isinstance(value, type) and issubclass(value, C.Callback)
    }
    tested = {type(make(pathlib.Path("/nowhere"))).__name__ for _, make, _ in CALLBACKS.values()}
    bases = {"Callback", "CallbackList"}
    elsewhere = {"ProgbarLogger"}  # test_callbacks.py
    optional = {"OrbaxCheckpoint"} - tested
    assert shipped - bases - elsewhere - optional == tested & shipped
