"""Turns of a worker that exchanges from TensorFlow: the op, the apply, what follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tf_smb import box, ops
from tf_smb.bench import model, segments
from tf_smb.bench.board import Board
from tf_smb.bench.case import Case, Setup, Turn
from tf_smb.bench.measuring import in_turns, measure, timed


def use_cores(setup: Setup) -> None:
    """Gives TensorFlow one thread for each core this worker has."""
    threads = max(1, len(setup.cores))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def make_exchange(handle: int, variables: list[tf.Variable]) -> Callable[[], tf.Tensor]:
    """Returns a graph that exchanges and applies, as the strategy's step does."""

    @tf.function
    def exchange() -> tf.Tensor:
        nothing = tf.constant(0, tf.int64)
        outcome, deltas = ops.exchange(
            handle,
            nothing,
            nothing,
            [variable.read_value() for variable in variables],
        )

        def apply() -> tf.Tensor:
            for variable, delta in zip(variables, deltas, strict=True):
                variable.assign_sub(delta, read_value=False)
            return outcome

        return tf.cond(tf.equal(outcome, ops.MOVED), apply, lambda: outcome)

    return exchange


def make_update(variables: list[tf.Variable]) -> Callable[[], None]:
    """Returns a graph that does what the update of an optimizer does to the variables."""
    gradients = [tf.zeros_like(variable) for variable in variables]

    @tf.function
    def update() -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=tf.constant(0.01), delta=gradient
            )

    return update


class OpTurns:
    """Exchanges TensorFlow variables through the op."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._worker = segments.WorkerBox(setup, board)
        use_cores(setup)

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn; "op_exchange" is op, apply and the next update's extra cost."""
        setup, board = self._worker.setup, self._worker.board
        arrays = model.new_model(turn.case.params_mb, seed=0)
        with self._worker.open(turn, arrays) as segment:
            model.fill(arrays, seed=1 + setup.index)
            variables = [tf.Variable(array) for array in arrays]
            del arrays
            exchange = make_exchange(segment.handle, variables)
            update = make_update(variables)
            if turn.check:
                in_turns(board, setup, lambda: self._check(turn.case, segment, variables, exchange))
            times = measure(board, turn, lambda: self._iteration(exchange, update))
            self._worker.free(turn)
            return {"times": times}

    def _iteration(
        self, exchange: Callable[[], tf.Tensor], update: Callable[[], None]
    ) -> dict[str, float]:
        applied = timed(exchange)
        self._worker.board.wait()
        after = timed(update)
        self._worker.board.wait()
        plain = timed(update)
        return {
            "op_exchange": applied + after - plain,
            "op_and_apply": applied,
            "op_update_after": after,
            "op_update": plain,
        }

    def _check(
        self,
        case: Case,
        segment: box.Segment,
        variables: list[tf.Variable],
        exchange: Callable[[], tf.Tensor],
    ) -> None:
        before, centers = values_of(variables), segment.read()
        exchange()
        segments.check_move(case, before, centers, values_of(variables), segment.read())


def values_of(variables: list[tf.Variable]) -> list[np.ndarray]:
    """Returns copies of the variables' values."""
    return [np.array(variable) for variable in variables]
