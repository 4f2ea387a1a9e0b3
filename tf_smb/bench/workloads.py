"""All workloads, in the order of the help."""

from __future__ import annotations

from tf_smb.bench.accumulate import Accumulate
from tf_smb.bench.barrier import Barrier
from tf_smb.bench.exchange import Exchange
from tf_smb.bench.notify import Notify
from tf_smb.bench.read import Read
from tf_smb.bench.scaling import Scaling
from tf_smb.bench.workload import Workload
from tf_smb.bench.write import Write

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (Exchange(), Read(), Write(), Accumulate(), Barrier(), Notify(), Scaling())
}
