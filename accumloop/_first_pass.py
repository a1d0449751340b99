"""The first of two passes: the outputs of a batch, without gradients.

It runs in a `keras.StatelessScope`: what it would move (seeds, statistics) passes from
micro-batch to micro-batch and is dropped, so that the second pass draws the same again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _ancestors, _cut, _functions, _keras, _loop, _sums


class Outputs(NamedTuple):
    """The outputs of rows, flat, without the `None`s among them."""

    tensors: list[Any]
    masks: list[Any]  # of each output, or None


class FirstPass:
    """The forward passes of the micro-batches of a batch, and the structure of what they return."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._call = _keras.training_call(model)
        self._function = _loop.as_function(model, self._forward, jit_compile=model.jit_compile)
        self._eager_traces: dict[str, Any] = {}  # by the signature of the inputs
        self._structure: Any = None  # of the outputs: where they are not None

    def __call__(self, x: Any, cut: _cut.Cut) -> Outputs:
        """Return the outputs of all micro-batches of the inputs `x`, put together."""
        variables = self._model.non_trainable_variables
        state = [tf.convert_to_tensor(variable.value) for variable in variables]
        example = self._example(cut.of(x, tf.constant(0, tf.int64)), state)
        like = _cut.leaves(example)
        arrays = [_sums.empty_array(tensor, cut.pieces) for tensor in like]

        def body(index: Any, arrays: list[Any], state: list[Any]) -> Any:
            outputs, state = self._function(cut.of(x, index), state)
            with tf.control_dependencies(_checks_of_rows(outputs.tensors, cut.rows_of(index))):
                at = tf.cast(index, tf.int32)
            tensors = _cut.leaves(outputs)
            arrays = [array.write(at, part) for array, part in zip(arrays, tensors, strict=True)]
            return index + 1, arrays, state

        _, arrays, _ = tf.while_loop(
            lambda index, *_: index < cut.pieces,
            body,
            [tf.constant(0, tf.int64), arrays, state],
            parallel_iterations=1,  # More would hold the activations of as many micro-batches.
        )
        whole = [array.concat() for array in arrays]
        for tensor, part in zip(whole, like, strict=True):
            tensor.set_shape([None, *part.shape[1:]])
        return _loop.packed(example, whole)

    def y_pred(self, outputs: Outputs) -> Any:
        """Return outputs as the model returns them, with their masks."""
        for tensor, mask in zip(*outputs, strict=True):
            _keras.set_mask(tensor, mask)
        tensors = iter(outputs.tensors)
        return tf.nest.map_structure(
            lambda present: next(tensors) if present else None, self._structure
        )

    def _example(self, x: Any, state: list[Any]) -> Outputs:
        """Return the outputs of a trace, which can be taken a second time."""
        if not self._model.run_eagerly:
            concrete = self._function.get_concrete_function(x, state)
            _refuse_moving(concrete)
            return concrete.structured_outputs[0]
        signature = _cut.signature(x)
        if signature not in self._eager_traces:
            self._eager_traces[signature] = _loop.trace_of_eager(
                self._forward,
                [x, state],
                "With whole_batch_loss=True and `run_eagerly=True`, a model must be one that can "
                "be traced, to see whether it draws what cannot be drawn again. Compile with "
                "run_eagerly=False.",
            )
            _refuse_moving(self._eager_traces[signature])
        return self._eager_traces[signature].structured_outputs[0]

    def _forward(self, x: Any, state: list[Any]) -> tuple[Outputs, list[Any]]:
        """Return the outputs of a micro-batch, and the state that it leaves."""
        model = self._model
        moving = model.non_trainable_variables
        others = [*model.trainable_variables, *model.metrics_variables]
        mapping = [(variable, tf.convert_to_tensor(variable.value)) for variable in others]
        mapping += zip(moving, state, strict=True)
        scope = keras.StatelessScope(mapping, collect_losses=True)
        with scope, _functions.traced_anew():
            y_pred = self._call(x)
        _refuse_unknown_state(scope, [variable for variable, _ in mapping])
        self._structure = tf.nest.map_structure(lambda leaf: leaf is not None, y_pred)
        tensors = _cut.leaves(y_pred)
        _refuse_rowless(tensors)
        masks = [_keras.mask_of(tensor) for tensor in tensors]
        return Outputs(tensors, masks), [scope.get_current_value(v) for v in moving]


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
    nodes = _ancestors.nodes_of(concrete.graph)
    moving = {node.op for node in nodes if node.op.startswith(_MOVING)}
    if moving:
        raise NotImplementedError(
            "With whole_batch_loss=True, the second pass must draw what the first one drew, and "
            "raw TensorFlow ops that draw or assign cannot be put back. Draw with `keras.random` "
            "and a `keras.random.SeedGenerator`, and keep state in Keras variables. "
            f"Received: {sorted(moving)}"
        )
