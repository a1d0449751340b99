"""`whole_batch_loss=True`: exact for any loss over outputs, also one that couples rows.

```
outputs = [model(micro_batch) for each micro-batch]         # no gradient, no activation is kept
loss, d_outputs = loss and gradient of the loss of the batch, on all outputs
for each micro-batch:
    gradient += gradient of sum(model(micro_batch) * its part of d_outputs)
```

The first pass runs in a `keras.StatelessScope`: what it would move (seeds, statistics) passes
from micro-batch to micro-batch and is dropped, so that the second pass draws the same again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _accumulator, _cut, _keras, _loop, _moments, _trackers, _withheld

Logs = dict[str, Any]


class _Outputs(NamedTuple):
    """The outputs of rows, flat, without the `None`s among them."""

    tensors: list[Any]
    masks: list[Any]  # of each output, or None


class _Loss(NamedTuple):
    """The loss of a batch, and its gradients."""

    loss: Any
    numbers: list[_trackers.Number]
    of_outputs: list[Any]  # None for an output that the loss does not depend on
    of_weights: list[Any]  # past the outputs: regularizers, weights that the loss reads


class _TwoPasses:
    """The functions of the two passes, and what their traces have found."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._call = _keras.training_call(model)
        self._structure: Any = None  # of the outputs: where they are not None
        self.loss_trackers: list[_trackers.Tracker] = []
        self.plan = _withheld.Plan()

    def forward(self, x: Any, state: list[Any]) -> tuple[_Outputs, list[Any]]:
        """Return the outputs of a micro-batch, and the state that it leaves."""
        model = self._model
        moving = model.non_trainable_variables
        others = [*model.trainable_variables, *model.metrics_variables]
        mapping = [(variable, tf.convert_to_tensor(variable.value)) for variable in others]
        mapping += zip(moving, state, strict=True)
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            y_pred = self._call(x)
        _refuse_unknown_state(scope, [variable for variable, _ in mapping])
        self._structure = tf.nest.map_structure(lambda leaf: leaf is not None, y_pred)
        tensors = _cut.leaves(y_pred)
        _refuse_rowless(tensors)
        masks = [_keras.mask_of(tensor) for tensor in tensors]
        return _Outputs(tensors, masks), [scope.get_current_value(v) for v in moving]

    def loss(self, batch: Any, outputs: _Outputs) -> _Loss:
        """Return the loss of a whole batch."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        # What layers add belongs to micro-batches: the second pass has it, and `model.losses`
        # has not, as the first pass has cleared it.
        watched = [tensor for tensor in outputs.tensors if tensor.dtype.is_floating]
        weights = model.trainable_weights
        with tf.GradientTape() as tape, _trackers.withheld(model) as updates:
            tape.watch(watched)
            loss = _keras.compute_loss(model, x, y, self.y_pred(outputs), sample_weight)
            scaled = model.optimizer.scale_loss(loss)
        gradients = iter(tape.gradient(scaled, [*watched, *weights]))
        of_outputs = [
            next(gradients) if tensor.dtype.is_floating else None for tensor in outputs.tensors
        ]
        of_outputs = [None if g is None else tf.convert_to_tensor(g) for g in of_outputs]
        self.loss_trackers[:] = [update.tracker for update in updates]
        numbers = [_trackers.part_of(update, 1.0) for update in updates]
        return _Loss(loss, numbers, of_outputs, list(gradients))

    def backward(self, inputs: Any, share: Any, divisors: Any) -> _withheld.Outcome:
        """Return the gradients of a micro-batch, by those of its outputs."""
        model = self._model
        x, of_outputs = inputs
        with (
            tf.GradientTape() as tape,
            _trackers.withheld(model) as updates,
            _moments.withheld(model) as moments,
        ):
            tensors = _cut.leaves(self._call(x))
            added = _added_losses(model) * share
            scaled = model.optimizer.scale_loss(added)
        wanted = [(t, g) for t, g in zip(tensors, of_outputs, strict=True) if g is not None]
        targets = [scaled, *(tensor for tensor, _ in wanted)]
        seeds = [tf.ones_like(scaled), *(gradient for _, gradient in wanted)]
        weights = model.trainable_weights
        gradients = tape.gradient(targets, weights, output_gradients=seeds) if weights else []
        for gradient, weight in zip(gradients, weights, strict=True):
            _accumulator.set_static_shape(gradient, weight.shape)
        return _withheld.Outcome(
            self.plan.parts([gradients], updates, moments, {"added": added}, share), []
        )

    def apply(self, gradients: list[Any]) -> None:
        """Update the weights."""
        weights = self._model.trainable_weights
        if not weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        self._model.optimizer.apply_gradients(zip(gradients, weights, strict=True))

    def y_pred(self, outputs: _Outputs) -> Any:
        """Return outputs as the model returns them, with their masks."""
        for tensor, mask in zip(*outputs, strict=True):
            _keras.set_mask(tensor, mask)
        tensors = iter(outputs.tensors)
        return tf.nest.map_structure(
            lambda present: next(tensors) if present else None, self._structure
        )


def make_update(model: keras.Model) -> Callable[..., Logs]:
    """Return `update(batch, accum) -> logs`: two passes over the micro-batches of a batch."""
    passes = _TwoPasses(model)
    options = {"jit_compile": model.jit_compile}
    forward = _loop.as_function(model, passes.forward, **options)
    loss_of = _loop.as_function(model, passes.loss, **options)
    apply = _loop.as_function(model, passes.apply, **options)
    backward = _loop.as_function(model, passes.backward, **options)
    total = _loop.total_of(backward, model, has_divisors=False)

    def update(batch: Any, accum: Any) -> Logs:
        cut = _cut.Cut(batch, accum)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(cut.batch)
        outputs = _collected(model, forward, x, cut)
        whole = loss_of(cut.batch, outputs)
        inputs = (x, whole.of_outputs)
        parts = total(lambda index: (cut.of(inputs, index), cut.share(index)), cut.pieces)
        gradients = zip(whole.of_weights, parts.gradients[0], strict=True)
        apply([_sum(*pair) for pair in gradients])
        loss = whole.loss + tf.cast(parts.logs["added"], whole.loss.dtype)
        _keras.loss_tracker(model).update_state(loss, sample_weight=cut.rows)
        passes.plan.update_once(parts, cut.rows)
        for tracker, number in zip(passes.loss_trackers, whole.numbers, strict=True):
            _trackers.update_once(tracker, number, cut.rows)
        y_pred = passes.y_pred(outputs)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    return _loop.as_function(model, update)


def _added_losses(model: keras.Model) -> Any:
    """Return the sum of what layers have added, without regularizers, as float64."""
    regularizers = sum(weight.regularizer is not None for weight in model.trainable_weights)
    added = model.losses[: len(model.losses) - regularizers]
    total = tf.zeros([], tf.float64)
    for loss in added:
        total += tf.cast(tf.reduce_sum(loss), tf.float64)
    return total


def _sum(gradient: Any, other: Any) -> Any:
    """Return the sum of two gradients of a weight, as a tape does."""
    present = [part for part in (gradient, other) if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(part, tf.IndexedSlices) for part in present):
        return tf.IndexedSlices(
            tf.concat([part.values for part in present], axis=0),
            tf.concat([part.indices for part in present], axis=0),
            gradient.dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(part) for part in present])


def _collected(model: keras.Model, forward: Any, x: Any, cut: _cut.Cut) -> _Outputs:
    """Return the outputs of all micro-batches, put together."""
    state = [tf.convert_to_tensor(variable.value) for variable in model.non_trainable_variables]
    first = cut.of(x, tf.constant(0, tf.int64))
    if model.run_eagerly:
        concrete = _traced(forward, first, state)
    else:
        concrete = forward.get_concrete_function(first, state)
    _refuse_moving(concrete)
    example, _ = concrete.structured_outputs
    like = _cut.leaves(example)
    arrays = [_accumulator.empty_array(tensor, cut.pieces) for tensor in like]

    def body(index: Any, arrays: list[Any], state: list[Any]) -> Any:
        outputs, state = forward(cut.of(x, index), state)
        with tf.control_dependencies(_checks_of_rows(outputs.tensors, cut.rows_of(index))):
            at = tf.cast(index, tf.int32)
        tensors = _cut.leaves(outputs)
        arrays = [array.write(at, tensor) for array, tensor in zip(arrays, tensors, strict=True)]
        return index + 1, arrays, state

    _, arrays, _ = tf.while_loop(
        lambda index, *_: index < cut.pieces,
        body,
        [tf.constant(0, tf.int64), arrays, state],
        parallel_iterations=1,
    )
    whole = [array.concat() for array in arrays]
    for tensor, part in zip(whole, like, strict=True):
        tensor.set_shape([None, *part.shape[1:]])
    return _loop.packed(example, whole)


def _traced(forward: Any, x: Any, state: list[Any]) -> Any:
    """Return a trace of the forward pass of a model that runs eagerly."""
    function = tf.function(tf.autograph.experimental.do_not_convert(forward))
    try:
        return function.get_concrete_function(x, state)
    except Exception as error:  # Whatever a model that is meant to run eagerly raises in a graph.
        raise NotImplementedError(
            "With whole_batch_loss=True and `run_eagerly=True`, a model must be one that can be "
            "traced, to see whether it draws what cannot be drawn again. Compile with "
            "run_eagerly=False."
        ) from error


def _checks_of_rows(tensors: list[Any], rows: Any) -> list[Any]:
    checks = [
        tf.debugging.assert_equal(
            tf.shape(tensor, out_type=tf.int64)[0],
            rows,
            message="With whole_batch_loss=True, each output of the model must have the rows of "
            "its inputs.",
        )
        for tensor in tensors
    ]
    return [check for check in checks if check is not None]


def _refuse_rowless(tensors: list[Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor) or tensor.shape.rank == 0:
            raise NotImplementedError(
                "With whole_batch_loss=True, each output of the model must be a dense tensor with "
                f"the rows of its inputs. Received: {tensor}"
            )


def _refuse_unknown_state(scope: keras.StatelessScope, known: list[Any]) -> None:
    """Refuse state that the model does not list: the second pass would find it moved."""
    if set(scope.state_mapping) - {id(variable) for variable in known}:
        raise NotImplementedError(
            "With whole_batch_loss=True, the second pass draws again what the first one drew, and "
            "a layer moves a variable that the model does not track, such as the global seed "
            "generator. Give the layer a `keras.random.SeedGenerator` as an attribute, and pass "
            "it as `seed`."
        )


# Ops that draw from, or move, what is no Keras variable.
_MOVING = (
    *("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal", "Rng"),
    *("StatefulRandom", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform"),
    *("Assign", "ResourceScatter"),
)


def _refuse_moving(concrete: Any) -> None:
    """Refuse a forward pass that would not be the same a second time."""
    definition = concrete.graph.as_graph_def()
    functions = [node for function in definition.library.function for node in function.node_def]
    moving = {n.op for n in [*definition.node, *functions] if n.op.startswith(_MOVING)}
    if moving:
        raise NotImplementedError(
            "With whole_batch_loss=True, the second pass must draw what the first one drew, and "
            "raw TensorFlow ops that draw or assign cannot be put back. Draw with `keras.random` "
            "and a `keras.random.SeedGenerator`, and keep state in Keras variables. "
            f"Received: {sorted(moving)}"
        )
