"""A Ray cluster on this host: a head that runs nothing, and two nodes. Obeys lines on standard input; run apart.

It prints the head's address. A line is `kill NODE`, where NODE begins a node's id, `add`, or `kill head`, which kills
the head's GCS. Each is answered by the ids of the nodes that are left.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

CPUS = 4
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


NOTES = Path("/tmp/ray")  # where Ray notes the cluster's address, wherever its own folder is, and does not make


def main(folder: str) -> None:
    NOTES.mkdir(exist_ok=True)
    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "temp_dir": folder,
            "include_dashboard": False,
            "node_ip_address": "127.0.0.1",
            "_system_config": SOON,
        },
    )
    nodes = {}

    def add() -> None:
        node = cluster.add_node(num_cpus=CPUS, node_ip_address="127.0.0.1")
        nodes[node.node_id] = node

    add()
    add()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["kill", "head"]:
                cluster.head_node.kill_gcs_server()
            case ["kill", start]:
                (name,) = [name for name in nodes if name.startswith(start)]
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case ["add"]:
                add()
        print(*nodes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
