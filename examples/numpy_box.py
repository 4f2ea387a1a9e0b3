"""The box without TensorFlow: workers that fit a line, each on points of its own.

python examples/numpy_box.py                       # two workers, started by the example
tf-smb run -n 3 -- python examples/numpy_box.py    # three, started by the launcher
"""

from __future__ import annotations

import multiprocessing
import os

import numpy as np

import tf_smb

TRUE_SLOPE, TRUE_OFFSET = 3.0, -1.0


def work(address: str, num_workers: int, worker_index: int) -> None:
    """Fits y = slope x + offset on this worker's points, exchanging every 5 steps."""
    random = np.random.default_rng(worker_index)
    # Worker i sees only points in [i, i + 1]: by itself it would know little of the rest.
    x = random.uniform(worker_index, worker_index + 1, 1000).astype(np.float32)
    y = TRUE_SLOPE * x + TRUE_OFFSET + random.normal(0, 0.1, x.shape).astype(np.float32)
    slope, offset = np.zeros(1, np.float32), np.zeros(1, np.float32)

    client = tf_smb.Client(address, job_id="numpy_box")
    variables = [("slope", (1,)), ("offset", (1,))]
    with client.create("line", variables, num_workers=num_workers) as segment:
        rule = tf_smb.ElasticAveraging(communication_period=5)
        segment.start([slope, offset], worker_index=worker_index, rule=rule)
        for step in range(1, 3001):
            batch = random.integers(0, len(x), 32)
            error = slope * x[batch] + offset - y[batch]
            slope -= 0.02 * (error * x[batch]).mean()
            offset -= 0.02 * error.mean()
            if step % rule.communication_period == 0:
                segment.exchange([slope, offset], steps=step)
        segment.meet([slope, offset])
        print(
            f"worker {worker_index}: y = {slope[0]:.2f} x + {offset[0]:.2f}, after "
            f"{int(segment.stats()['exchanges'])} exchanges",
            flush=True,
        )


def main() -> None:
    """Runs as a worker of `tf-smb run`, or else starts two workers."""
    address = os.environ.get("TF_SMB_SERVER")
    if address:
        num_workers = int(os.environ["TF_SMB_NUM_WORKERS"])
        work(address, num_workers, int(os.environ["TF_SMB_WORKER_INDEX"]))
        return
    # 'spawn': a forked child must not use what its parent attached.
    context = multiprocessing.get_context("spawn")
    with tf_smb.Server() as server:
        workers = [context.Process(target=work, args=(server.address, 2, i)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode != 0 for worker in workers):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
