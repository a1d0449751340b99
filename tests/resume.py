"""Training that is killed again and again, against training that is not, to the last bit.

`python resume.py KIND DATA KILLS SEED`, in a process of its own: it forks before TensorFlow has
begun to run, so that each run costs no import.
"""

import os
import pathlib
import pickle
import random
import signal
import sys
import tempfile

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import accumloop
from accumloop import _state, _store

EPOCHS, STEPS = 4, 7  # 40 rows in batches of 6
KINDS = {
    "keras": lambda path: keras.callbacks.BackupAndRestore(path),
    "epoch": lambda path: accumloop.BackupAndRestore(path),
    "batches": lambda path: accumloop.BackupAndRestore(path, save_freq=3),
}
STAGES = {
    "epoch": ["at the variables", "at the manifest", "at the renaming", "at the removal"],
    "keras": ["after the weights"],
}
STAGES["batches"] = STAGES["epoch"]


def make_ds(data):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[40, 5]).astype("float32")
    arrays = (x, (x[:, :1] ** 2 + x[:, 1:2]))

    def rows():
        yield from zip(*arrays, strict=True)

    if data == "generator":
        spec = tuple(tf.TensorSpec(array.shape[1:], tf.float32) for array in arrays)
        return tf.data.Dataset.from_generator(rows, output_signature=spec).batch(6)
    ds = tf.data.Dataset.from_tensor_slices(arrays).shuffle(16, seed=3)
    return (ds.repeat() if data == "endless" else ds).batch(6)


class Kill(keras.callbacks.Callback):
    """Kills the process after an update, or in the first backup after it."""

    def __init__(self, update, stage):
        super().__init__()
        self.update = update
        self.stage = stage

    def set_model(self, model):
        super().set_model(model)
        if self.stage == "at the variables":
            self.before(_state, "_checkpoint")
        elif self.stage == "at the manifest":
            self.before(_store, "_write_text")
        elif self.stage == "at the renaming":
            self.before(tf.io.gfile, "rename")
        elif self.stage == "at the removal":
            self.before(tf.io.gfile, "rmtree")
        elif self.stage == "after the weights":
            self.before(self.model, "save_weights", after=True)

    def before(self, owner, name, after=False):
        function = getattr(owner, name)

        def killing(*args, **kwargs):
            if after:
                function(*args, **kwargs)
            if self.model.optimizer.built and self.model.optimizer.iterations >= self.update:
                self.kill()
            return function(*args, **kwargs)

        setattr(owner, name, killing)

    def on_train_batch_end(self, batch, logs=None):
        if not self.stage and self.model.optimizer.iterations == self.update:
            self.kill()

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)


def run(kind, data, directory, result, kill):
    keras.utils.set_random_seed(5)
    dropouts = [keras.layers.Dropout(0.5) for _ in "ab"]
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(8, "relu"), *dropouts])
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    callbacks = [] if kill is None else [Kill(*kill)]
    if kind != "keras":  # It has no state of other callbacks.
        callbacks += [
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=0.2),
            keras.callbacks.EarlyStopping("mae", patience=3, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        ]
    if directory is not None:
        callbacks.append(KINDS[kind](directory))
    steps = {"steps_per_epoch": STEPS} if data == "endless" else {}
    history = accumloop.train(
        model, make_ds(data), 3, epochs=EPOCHS, verbose=0, callbacks=callbacks, **steps
    )
    values = {
        "weights": model.get_weights(),
        "optimizer": [variable.numpy() for variable in model.optimizer.variables],
        "seeds": [layer.seed_generator.state.numpy() for layer in dropouts],
    }
    logs = {
        epoch: {name: values[index] for name, values in history.history.items()}
        for index, epoch in enumerate(history.epoch)
    }
    pathlib.Path(result).write_bytes(pickle.dumps((values, logs)))


def in_a_process(*args):
    """Return the signal that ended a run, or 0."""
    process = os.fork()
    if not process:
        try:
            run(*args)
        except BaseException as error:
            print(f"{args}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0
    return 0


def main(kind, data, kills, seed):
    numbers = random.Random(seed)
    with tempfile.TemporaryDirectory() as path:
        result, backup = f"{path}/result", f"{path}/backup"
        assert in_a_process(kind, data, None, result, None) == 0
        values, logs = pickle.loads(pathlib.Path(result).read_bytes())
        assert len(logs) == EPOCHS
        killed = 0
        while killed < kills:
            updates = sorted(numbers.sample(range(1, EPOCHS * STEPS + 1), min(5, kills - killed)))
            for update in updates:
                stage = numbers.choice(["", "", *STAGES[kind]])
                # There may be no backup any more to be killed in.
                killed += (
                    in_a_process(kind, data, backup, result, (update, stage)) == signal.SIGKILL
                )
            in_a_process(kind, data, backup, result, None)
            got, remaining = pickle.loads(pathlib.Path(result).read_bytes())
            for name, wanted in values.items():
                for one, other in zip(got[name], wanted, strict=True):
                    np.testing.assert_array_equal(one, other, err_msg=f"{updates}: {name}")
            assert {epoch: logs[epoch] for epoch in remaining} == remaining, updates
            assert not os.path.exists(backup)
    print("equal after", killed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
