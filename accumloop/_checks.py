"""Refusals with their messages, of what can be told before anything is built or changed."""

from __future__ import annotations

import numbers
import reprlib
import types
from typing import Any

import keras
import tensorflow as tf

from accumloop import _cut, _keras


def accum(value: Any) -> None:
    """Refuse a number of micro-batches that is not an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            "`accum` must be an int: the number of micro-batches to cut each batch into. "
            f"Received: accum={reprlib.repr(value)} (of type {type(value).__name__})"
        )
    if value < 1:
        raise ValueError(
            "`accum` must be at least 1, the whole batch in one micro-batch. "
            f"Received: accum={value!r}"
        )


def model(value: Any) -> None:
    """Refuse what is not a compiled Keras model on TensorFlow, on one device."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "accumloop trains Keras models on the TensorFlow backend: set "
            'KERAS_BACKEND="tensorflow" before Keras is imported. '
            f"Received: keras.backend.backend()={keras.backend.backend()!r}"
        )
    if not isinstance(value, keras.Model):
        raise TypeError(
            "`model` must be a `keras.Model`. "
            f"Received: model={value!r} (of type {type(value).__name__})"
        )
    if not value.compiled:
        raise ValueError(
            "You must call `model.compile()` before training, with the optimizer and loss that "
            f"`model.fit()` would have used. Received: model={value!r}"
        )
    for steps in _accumulation_steps(value.optimizer):
        raise ValueError(
            "The optimizer accumulates gradients by itself, and would do so a second time. "
            "Create it without `gradient_accumulation_steps`: here a batch of the dataset is one "
            f"update. Received: gradient_accumulation_steps={steps!r}"
        )
    # Of the class: that of the instance is `Accumulate`'s in the middle of a `fit`.
    if type(value).make_train_function is not keras.Model.make_train_function:
        raise NotImplementedError(
            "A model with its own `make_train_function` is not supported: accumloop makes the "
            f"function that trains. Received: {type(value).__name__}.make_train_function"
        )
    strategy = value.distribute_strategy
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        raise NotImplementedError(
            "Models under a `tf.distribute` strategy are not supported yet. "
            f"Received: model.distribute_strategy={strategy!r}"
        )


def _accumulation_steps(optimizer: Any) -> list[int]:
    """Return what optimizers that accumulate by themselves, wrapped ones too, are set to."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]
    own = getattr(optimizer, "gradient_accumulation_steps", None)
    return [own] if own else [n for o in inner if o is not None for n in _accumulation_steps(o)]


def dataset(value: Any) -> None:
    """Refuse what is not a batched `tf.data.Dataset`."""
    if not isinstance(value, tf.data.Dataset):
        raise TypeError(
            "`ds` must be a batched `tf.data.Dataset`. From arrays: "
            "`tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)`. "
            f"Received: ds of type {type(value).__name__}"
        )
    specs = [leaf for leaf in tf.nest.flatten(value.element_spec) if hasattr(leaf, "shape")]
    shapes = [tf.TensorShape(leaf.shape) for leaf in specs]
    if any(shape.rank == 0 for shape in shapes):
        raise _unbatched(value.element_spec)
    known = {shape[0] for shape in shapes if shape.rank is not None and shape[0] is not None}
    if len(known) > 1:
        raise _disagreement(sorted(known), value.element_spec)


def first_batch(batch: Any, element_spec: Any) -> None:
    """Refuse a dataset whose first batch has leaves that disagree in rows."""
    leaves = _cut.leaves(batch)
    if any(leaf.shape.rank == 0 for leaf in leaves):
        raise _unbatched(element_spec)
    known = {int(_cut.rows_of(leaf)) for leaf in leaves}
    if len(known) > 1:
        raise _disagreement(sorted(known), element_spec)


def _unbatched(element_spec: Any) -> ValueError:
    return ValueError(
        "`ds` must give batches, and gives single examples: one of its tensors is a scalar. "
        "Call `ds = ds.batch(batch_size)` first. "
        f"Received: ds.element_spec={element_spec}"
    )


def _disagreement(rows: list[int], element_spec: Any) -> ValueError:
    return ValueError(
        "All tensors of a batch must have the same number of rows, their first dimension. If "
        "`ds` gives single examples, call `ds = ds.batch(batch_size)` first. "
        f"Received: numbers of rows {rows}, ds.element_spec={element_spec}"
    )


def callbacks(value: Any) -> None:
    """Refuse callbacks that are none."""
    if value is None or isinstance(value, keras.callbacks.CallbackList):
        return
    for callback in tf.nest.flatten(value):
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                "`callbacks` must be a `keras.callbacks.Callback` or a list of them. "
                f"Received: {callback!r} (of type {type(callback).__name__})"
            )


def numbers_of_steps(
    *,
    epochs: Any,
    initial_epoch: Any,
    steps_per_epoch: Any,
    validation_steps: Any,
    validation_freq: Any,
    verbose: Any,
) -> None:
    """Refuse counts that are no counts."""
    for name, value, least, optional in (
        ("epochs", epochs, 0, False),
        ("initial_epoch", initial_epoch, 0, False),
        ("steps_per_epoch", steps_per_epoch, 1, True),
        ("validation_steps", validation_steps, 1, True),
        ("validation_freq", validation_freq, 1, True),
    ):
        if name == "validation_freq" and not isinstance(value, int):
            continue
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(
                f"`{name}` must be an int{' or None' if optional else ''}. "
                f"Received: {name}={value!r} (of type {type(value).__name__})"
            )
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}. Received: {name}={value!r}")
    if not isinstance(validation_freq, int | list):
        raise ValueError(
            "Expected `validation_freq` to be a list or int. "
            f"Received: validation_freq={validation_freq} of the type {type(validation_freq)}."
        )
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(f'`verbose` must be "auto", 0, 1 or 2. Received: verbose={verbose!r}')


def class_weight(value: Any, element_spec: Any) -> None:
    """Refuse class weights where `fit` does: with sample weights, or with nested labels."""
    if value is None:
        return
    if not isinstance(value, dict) or not value or not all(_is_class_id(key) for key in value):
        raise ValueError(
            "`class_weight` must be a dict from class ids, ints >= 0, to weights. "
            f"Received: class_weight={value!r}"
        )
    _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(element_spec)
    if sample_weight is not None:
        raise ValueError(
            "`class_weight` and sample weights cannot be used at the same time. Multiply them in "
            f"`ds`, or leave out one. Received: class_weight={value!r}, sample weights of "
            f"{sample_weight}"
        )
    if y is None or keras.tree.is_nested(y):
        raise ValueError(
            "`class_weight` is only supported for models with a single output. With several, give "
            f"`ds` sample weights for each. Received: class_weight={value!r}, labels of {y}"
        )


def whole_batch_loss(value: Any) -> None:
    """Refuse a `whole_batch_loss` that is no bool."""
    if not isinstance(value, bool):
        raise TypeError(
            "`whole_batch_loss` must be a bool. "
            f"Received: whole_batch_loss={value!r} (of type {type(value).__name__})"
        )


def validation(value: Any) -> None:
    """Refuse a generator: each epoch would see other batches of it."""
    if isinstance(value, types.GeneratorType):
        raise TypeError(
            "`validation_data` must be a dataset or a tuple of arrays. From a generator: "
            f"`tf.data.Dataset.from_generator`. Received: validation_data={value!r}"
        )


def _is_class_id(key: Any) -> bool:
    return isinstance(key, numbers.Integral) and int(key) >= 0


def cut_exactly(model: keras.Model, whole_batch_loss: bool) -> None:
    """Refuse a model whose micro-batches would train something else than its batches."""
    if whole_batch_loss and _keras.is_own(model, "train_step"):
        raise NotImplementedError(
            "whole_batch_loss=True needs the loss by itself, and a model with its own `train_step` "
            "computes it there. Override `compute_loss` instead. "
            f"Received: {type(model).__name__}.train_step"
        )
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                "A variable whose gradient is its next value, as float8 quantization has them, is "
                "not supported with accum > 1: such gradients do not add up. Use accum=1. "
                f"Received: variable '{variable.path}'"
            )
    for layer in _keras.flatten_layers(model):
        if getattr(layer, "stateful", False):
            raise NotImplementedError(
                "A stateful layer is not supported with accum > 1: its state belongs to the rows "
                "of a whole batch, and would pass from one micro-batch to the next. "
                f"Received: layer '{layer.name}'"
            )
