"""Turns of a worker of TensorFlow's own multi-worker all-reduce: rings over gRPC."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tf_smb.bench import model
from tf_smb.bench.board import Board
from tf_smb.bench.case import Setup, Turn
from tf_smb.bench.measuring import CheckFailedError, measure, repeated
from tf_smb.bench.op_turns import use_cores


class AllReduceTurns:
    """Sums a model's tensors over the workers of a MultiWorkerMirroredStrategy."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._setup = setup
        self._board = board
        use_cores(setup)
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": setup.addresses},
                "task": {"type": "worker", "index": setup.index},
            }
        )
        self._options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self._options
        )

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn."""
        seeds = range(1, 1 + self._setup.count)
        tensors = [
            tf.constant(array)
            for array in model.new_model(turn.case.params_mb, seed=seeds[self._setup.index])
        ]

        def in_replica() -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors, self._options)

        @tf.function
        def all_reduce() -> list[tf.Tensor]:
            return self._strategy.run(in_replica)

        if turn.check:
            self._check(turn, all_reduce())
        return {"times": measure(self._board, turn, repeated("tf_allreduce", all_reduce))}

    def _check(self, turn: Turn, sums: list[tf.Tensor]) -> None:
        expected = model.new_model(turn.case.params_mb, seed=1)
        for index in range(1, self._setup.count):
            for total, part in zip(
                expected, model.new_model(turn.case.params_mb, seed=1 + index), strict=True
            ):
                total += part
        for ours, theirs in zip(expected, sums, strict=True):
            if not np.allclose(ours, theirs.numpy(), rtol=1e-5):
                raise CheckFailedError("TensorFlow's all-reduce differs from numpy's sum")
