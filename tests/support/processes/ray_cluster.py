"""A sweep on a Ray cluster of two nodes, one of which is killed while it works: ray_cluster.py OUTPUT NAME...

Prints the model of each row, and that a node is killed.
It is a program of its own, since Ray reads its settings when it is imported.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

# Ray's nodes and its driver on 127.0.0.1, as on systems without clusters.
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")

from ray.cluster_utils import Cluster

from fvflops.sources import SourceOptions
from fvflops.sweep import CountSettings
from fvflops.sweep.counted_models import plan_sweep, run_sweep
from fvflops.sweep.local_pool import WorkerLimits
from fvflops.sweep.ray_pool import run_on_cluster

NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
_PATIENCE = 20  # seconds


def main(output, names):
    """Sweep, and kill the second node when it is building a model."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1, memory=4 << 30, **NODE) for _ in range(2)]
        cluster.wait_for_nodes()
        settings = CountSettings(peak_memory=False, memory=2 << 30)
        limits = WorkerLimits(timeout=100, memory=2 << 30)
        run = partial(run_on_cluster, address=cluster.address, limits=limits)
        for row in run_sweep(plan_sweep(names, output, SourceOptions(), settings), run):
            print(row.model, flush=True)
            if len(nodes) == 2 and is_building(nodes[1].all_processes["raylet"][0].process.pid):
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                print("killed", flush=True)
    finally:
        cluster.shutdown()


def is_building(raylet):
    """Return whether a node is building a model, after waiting for that: nodes work on while the driver waits."""
    deadline = time.monotonic() + _PATIENCE
    while last_event(raylet) != "begin" and time.monotonic() < deadline:
        time.sleep(0.02)
    return last_event(raylet) == "begin"


def last_event(raylet):
    """Return the last event of a node's models, "" before the first."""
    events = Path(os.environ["EVENTS"]).read_text().splitlines() if os.path.exists(os.environ["EVENTS"]) else []
    return next((line.split()[1] for line in reversed(events) if line.startswith(f"{raylet} ")), "")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
