"""Dividing a tf.data pipeline between workers.

A pipeline is looked at as the graph that tf.data serialises. If it is one chain of operations
that treat every element by itself (map, batch, shuffle, prefetch, ...) from one source of known
order, the division goes right behind the source: every sample is seen by exactly one worker in
each epoch, and no worker computes another one's elements. Else the batches are dealt out at the
end; then all workers must produce them in one order, so a shuffle without a seed is given one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops import options as options_lib

# Sources whose elements have one order, and can be divided.
_SOURCES = {"TensorSliceDataset", "RangeDataset"}
# Operations that commute with dividing the source: each output comes from elements that
# lie in one worker's part, and none counts elements over all workers.
_ELEMENTWISE = {
    "BatchDataset",
    "BatchDatasetV2",
    "CacheDataset",
    "CacheDatasetV2",
    "FilterDataset",
    "MapAndBatchDataset",
    "MapDataset",
    "ModelDataset",
    "OptionsDataset",
    "ParallelBatchDataset",
    "ParallelFilterDataset",
    "ParallelMapDataset",
    "ParallelMapDatasetV2",
    "PrefetchDataset",
    "RepeatDataset",
    "ShuffleDataset",
    "ShuffleDatasetV2",
    "ShuffleDatasetV3",
    "UnbatchDataset",
}
_SHUFFLES = {"ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2"}
_SHARED_SEED = 0x5B0C5
# A graph holds the arrays of from_tensor_slices; protobuf ends at 2 GiB.
_MAX_GRAPH_BYTES = 1 << 30


@dataclass(frozen=True)
class Divided:
    """A worker's part of a pipeline.

    Attributes:
        dataset: The part.
        samples: Elements of the source over all workers, if the division is there; else None.
        warning: What the user should know; empty if nothing.
    """

    dataset: tf.data.Dataset
    samples: int | None = None
    warning: str = ""


def divide(dataset: tf.data.Dataset, num_workers: int, worker_index: int) -> Divided:
    """Returns worker `worker_index`'s part of a batched pipeline."""
    graph = _graph_of(dataset)
    if graph is None:
        return Divided(
            dataset.shard(num_workers, worker_index),
            warning=(
                "this tf.data pipeline can only be divided batch by batch: if it shuffles, give "
                "the shuffle a seed, or workers may see the same samples"
            ),
        )
    nodes = {node.name: node for node in graph.node}
    source = _divisible_source(nodes)
    if source is not None:
        _shard_behind(graph, source, num_workers, worker_index)
        return Divided(_from_graph(graph, dataset), _source_size(source, nodes))
    if _seed_shuffles(graph, nodes):
        dataset = _from_graph(graph, dataset)
    return Divided(dataset.shard(num_workers, worker_index))


class SkippingDataset(dataset_ops.UnaryUnchangedStructureDataset):
    """A batched pipeline that leaves out its first batches in one epoch.

    To Keras it is as long as in all other epochs.

    Args:
        whole: The pipeline.
        epoch: In which epoch.
        skipped: How many batches.
    """

    def __init__(self, whole: tf.data.Dataset, epoch: int, skipped: int) -> None:
        self._whole = whole
        self._short_epoch = epoch
        self._skipped = skipped
        self.is_short = False
        super().__init__(whole, whole._variant_tensor)

    @property
    def length(self) -> int:
        """Batches of the present epoch."""
        whole = int(self._whole.cardinality().numpy())
        return whole - self._skipped if self.is_short else whole

    def begin_epoch(self, epoch: int) -> None:
        """Says which epoch the next iterators are of."""
        self.is_short = epoch == self._short_epoch and self._skipped > 0

    def begin_whole_epoch(self) -> None:
        """Says that the next iterators are of whole epochs."""
        self.is_short = False

    def __iter__(self) -> Any:
        return iter(self._whole.skip(self._skipped) if self.is_short else self._whole)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the batch size of a pipeline that ends in `batch` (and prefetch); None if unclear."""
    node: Any = dataset._whole if isinstance(dataset, SkippingDataset) else dataset
    while node is not None:
        size = getattr(node, "_batch_size", None)
        if size is not None:
            return int(size)
        if type(node).__name__ not in (
            "_PrefetchDataset",
            "_OptionsDataset",
            "_ParallelMapDataset",
        ):
            break
        node = getattr(node, "_input_dataset", None)
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    return shapes[0][0] if shapes and shapes[0].rank else None


def _graph_of(dataset: tf.data.Dataset) -> graph_pb2.GraphDef | None:
    """Returns the pipeline as a graph; None if tf.data cannot serialise it, or it is too large."""
    if _bytes_held(dataset) > _MAX_GRAPH_BYTES:
        return None
    try:
        serialized = dataset._as_serialized_graph(
            external_state_policy=options_lib.ExternalStatePolicy.FAIL
        )
    except tf.errors.OpError:
        return None
    graph = graph_pb2.GraphDef()
    graph.ParseFromString(serialized.numpy())
    return graph


def _bytes_held(dataset: tf.data.Dataset) -> int:
    """Returns the bytes of the tensors that the pipeline's sources hold."""
    held = 0
    pending = [dataset]
    while pending:
        node = pending.pop()
        for tensor in getattr(node, "_tensors", ()):
            held += tensor.dtype.size * (tensor.shape.num_elements() or 0)
        pending.extend(node._inputs())
    return held


def _divisible_source(nodes: dict[str, Any]) -> Any | None:
    """Returns the node behind which the pipeline can be divided; None if there is none."""
    node = next(node for node in nodes.values() if node.op == "_Retval")
    while True:
        inputs = [nodes[name.split(":")[0].lstrip("^")] for name in node.input]
        datasets = [
            parent for parent in inputs if parent.op.endswith(("Dataset", "DatasetV2", "DatasetV3"))
        ]
        if node.op in _SOURCES:
            return node
        if node.op != "_Retval" and node.op not in _ELEMENTWISE:
            return None
        if len(datasets) != 1:
            return None
        node = datasets[0]


def _source_size(source: Any, nodes: dict[str, Any]) -> int | None:
    tensors = [nodes[name].attr["value"].tensor for name in source.input]
    if source.op == "TensorSliceDataset":
        # Of the shape alone: strings cannot be read from their serialised form.
        dims = tensors[0].tensor_shape.dim
        return int(dims[0].size) if dims else None
    start, stop, step = (int(tf.make_ndarray(tensor)) for tensor in tensors[:3])
    return len(range(start, stop, step))


def _add_const(graph: graph_pb2.GraphDef, name: str, value: int) -> str:
    node = graph.node.add(name=name, op="Const")
    node.attr["dtype"].type = tf.int64.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))
    return name


def _shard_behind(
    graph: graph_pb2.GraphDef, source: Any, num_workers: int, worker_index: int
) -> None:
    name = "tf_smb_shard"
    consumers = [node for node in graph.node if source.name in node.input]
    shard = graph.node.add(name=name, op="ShardDataset")
    shard.input.extend(
        [
            source.name,
            _add_const(graph, name + "/num_workers", num_workers),
            _add_const(graph, name + "/worker_index", worker_index),
        ]
    )
    shard.attr["require_non_empty"].b = False
    shard.attr["output_shapes"].CopyFrom(source.attr["output_shapes"])
    shard.attr["output_types"].CopyFrom(
        source.attr["output_types" if "output_types" in source.attr else "Toutput_types"]
    )
    for consumer in consumers:
        for i, parent in enumerate(consumer.input):
            if parent == source.name:
                consumer.input[i] = name


def _seed_shuffles(graph: graph_pb2.GraphDef, nodes: dict[str, Any]) -> bool:
    """Gives every shuffle without a seed the same one on all workers; True if there was any."""
    changed = False
    for node in list(graph.node):
        if node.op not in _SHUFFLES:
            continue
        seeds = [nodes[name] for name in node.input[2:4]]
        if any(
            seed.op != "Const" or int(tf.make_ndarray(seed.attr["value"].tensor)) != 0
            for seed in seeds
        ):
            continue
        node.input[2] = _add_const(graph, node.name + "/tf_smb_seed", _SHARED_SEED)
        node.input[3] = _add_const(graph, node.name + "/tf_smb_seed2", _SHARED_SEED)
        changed = True
    return changed


def _from_graph(graph: graph_pb2.GraphDef, like: tf.data.Dataset) -> tf.data.Dataset:
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    restored = dataset_ops._VariantDataset(variant, like.element_spec)
    return restored.with_options(like.options())
