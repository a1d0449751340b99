"""Which batches an epoch has: iterators, steps, class weights, as `fit` has them."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _cut


class Execution(NamedTuple):
    """The steps of one call of the step function, and where their batches come from."""

    begin_step: int
    end_step: int
    first: Any  # tf.experimental.Optional of the first batch, empty if it is not read yet
    iterator: Any  # for the batches after it


class Place(NamedTuple):
    """Where the data is: how many iterators were made, and how far the last one has been read."""

    iterators: int
    seen: int
    ended: bool


class Epochs:
    """The batches of each epoch of a dataset.

    Makes iterators when `fit` does, also those that `fit` never reads: a seeded shuffle that
    reshuffles each iteration gives its n-th order to the n-th iterator. With `steps_per_epoch`
    one iterator goes on across epochs. Of a dataset of unknown length a batch is read before the
    events of its step are told, so that the end is seen before a step begins; else it is left to
    the step, which reads it in its graph.

    Args:
        ds: A batched `tf.data.Dataset`.
        steps_per_epoch: Batches of an epoch, or None for the whole dataset.
        steps_per_execution: Batches of one call of the step function.
    """

    def __init__(
        self, ds: tf.data.Dataset, steps_per_epoch: int | None, steps_per_execution: int
    ) -> None:
        self._ds = ds
        self._steps_per_epoch = steps_per_epoch
        self._steps_per_execution = steps_per_execution
        cardinality = int(ds.cardinality())
        self._length = cardinality if cardinality > 0 else None
        # No length, but no end either: the step can read it unseen.
        self._known = cardinality > 0 or cardinality == tf.data.INFINITE_CARDINALITY
        self._unread = tf.experimental.Optional.empty(ds.element_spec)
        self._iterator: Any = None
        self._peeked: Any = None
        self._iterators = 0
        self._seen = 0

    @property
    def steps(self) -> int | None:
        """The number of steps of an epoch, or None while it is unknown."""
        return self._steps_per_epoch or self._length

    @property
    def length(self) -> int | None:
        """The number of batches of the dataset, or None if it has no end or is not known."""
        return self._length

    @property
    def endless(self) -> bool:
        """Whether one iterator may serve all epochs."""
        return self._steps_per_epoch is not None and self._length is None

    def peek(self) -> Any | None:
        """Return the first batch that training will see, or None for an empty dataset."""
        self._make_iterator()
        self._peeked = self._iterator.get_next_as_optional()
        return self.peeked

    @property
    def peeked(self) -> Any | None:
        """The first batch, while no epoch has begun."""
        return self._peeked.get_value() if self._peeked.has_value() else None

    @property
    def iterator(self) -> Any | None:
        """The iterator that the next batch comes from, or None if another one is to be made."""
        return self._iterator

    def epoch(self, begin: int = 0) -> Iterator[Execution]:
        """Yield the executions of the next epoch, or those of a running one from step `begin`."""
        if not begin and (self._steps_per_epoch is None or self._iterator is None):
            self._renew()
        for step in self._begin_steps(begin):
            if self._at_end():
                _warn_out_of_data()
                break
            if self._peeked is None and not self._known:
                self._peeked = self._iterator.get_next_as_optional()
            if self._peeked is not None and not self._peeked.has_value():
                self._end_of_data()
                return
            self._seen += self._steps_per_execution
            yield self._pop(step)
        if self._at_end():
            self._renew()

    def pass_over(self, epochs: int) -> None:
        """Go to where the data is after some epochs, reading only what a later one does not."""
        for _ in range(epochs):
            if self._steps_per_epoch is not None:
                for execution in self.epoch():
                    unread = 0 if execution.first.has_value() else 1
                    self._read(self._steps_per_execution - 1 + unread)
                continue
            self._renew()
            self._peeked = None
            if self._length is not None:
                self._renew()

    def place(self) -> Place:
        """Return where the data is, between two executions."""
        return Place(self._iterators, self._seen, self._iterator is None)

    def go_to(self, place: Place, restore: Callable[[Any], None] | None) -> None:
        """Go to a place at which another process has been.

        Args:
            place: The place.
            restore: Sets an iterator to where that of the place was; None to read up to there.
        """
        read = 1 if place.iterators == self._iterators else 0
        for _ in range(place.iterators - self._iterators):
            self._make_iterator()
        self._peeked = None
        self._seen = place.seen
        if restore is not None:
            restore(self._iterator)
        else:
            self._read(place.seen - read)
        if place.ended:
            self._iterator = None

    def _read(self, batches: int) -> None:
        for _ in range(batches):
            if not self._iterator.get_next_as_optional().has_value():
                return

    def _make_iterator(self) -> None:
        self._iterators += 1
        self._iterator = iter(self._ds)

    def _begin_steps(self, begin: int) -> Iterator[int]:
        step = begin
        while self.steps is None or step < self.steps:
            yield step
            step += self._steps_per_execution

    def _at_end(self) -> bool:
        return self._length is not None and self._seen >= self._length

    def _pop(self, step: int) -> Execution:
        # No name here outlives the call: a batch that has been used must not wait in memory.
        first, self._peeked = self._peeked, None
        return Execution(
            step,
            step + self._steps_per_execution - 1,
            self._unread if first is None else first,
            self._iterator,
        )

    def _renew(self) -> None:
        self._seen = 0
        if self._peeked is None:
            self._make_iterator()

    def _end_of_data(self) -> None:
        if self._steps_per_epoch or not self._seen:
            _warn_out_of_data()
        self._iterator = self._peeked = None


def fingerprint(batch: Any) -> int:
    """Return a checksum of what a batch holds."""
    checksum = 0
    for leaf in tf.nest.flatten(_cut.without_optionals(batch), expand_composites=True):
        if leaf is not None:
            checksum = zlib.crc32(tf.io.serialize_tensor(leaf).numpy(), checksum)
    return checksum


def with_class_weight(ds: tf.data.Dataset, class_weight: dict[int, float]) -> tf.data.Dataset:
    """Return `(x, y, sample_weight)` batches of `(x, y)` batches, as `fit` weights classes."""
    weights = tf.convert_to_tensor(
        [class_weight.get(label, 1.0) for label in range(max(class_weight) + 1)]
    )

    def weigh(*batch: Any) -> tuple[Any, Any, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return x, y, tf.gather(weights, _class_ids(y))

    return ds.map(weigh).prefetch(tf.data.AUTOTUNE)


def _class_ids(labels: Any) -> Any:
    """Return int32 class ids of labels that are ids, a column of ids, or one-hot rows."""

    def ids() -> Any:
        column = labels if labels.shape.rank == 1 else tf.squeeze(labels, axis=-1)
        return tf.cast(tf.round(column), tf.int32)

    def of_one_hot() -> Any:
        return tf.argmax(labels, axis=-1, output_type=tf.int32)

    if labels.shape.rank == 1 or labels.shape[-1] == 1:
        return ids()
    if labels.shape[-1] is not None:
        return of_one_hot()
    return tf.cond(tf.shape(labels)[-1] > 1, of_one_hot, ids)


def _warn_out_of_data() -> None:
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or "
        "generator can generate at least `steps_per_epoch * epochs` batches. You may need to use "
        "the `.repeat()` function when building your dataset.",
        stacklevel=2,
    )
