"""How long a replay of one hour of a production service takes on one core, and what it shows.

    python bench/replay.py [--no-save]

Replays 19,366 requests on 8 GPUs three times (static partition, borrowing, twice the memory). Goal: under 20 s.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ema_cli.pool_file import read_pool
from ema_cli.replay_report import as_object
from ema_cli.serving.presets import GPUS, MODELS
from ema_cli.serving.replay import Setup, replay
from ema_cli.serving.trace import read_trace
from record import Row, at_most, finish, plain, record

ROOT = Path(__file__).parents[1]
GOAL_SECONDS = 20.0
WHAT = "Replay of one hour: Llama-3.1-70B on 8 H200 over NVLink, three runs"


def rows(report: Mapping[str, Any], wall: float, cpu: float) -> list[Row]:
    """How long it took, and what the three runs served."""
    found = [
        at_most(GOAL_SECONDS, f"three runs of {report['requests']} requests, processor time", cpu, "s"),
        plain(f"three runs of {report['requests']} requests, by the clock", wall, "s"),
    ]
    for name, run in report["runs"].items():
        found.append(plain(f"{name}: served", 100 * run["served"] / run["offered"], "% of what was offered"))
        found.append(plain(f"{name}: tokens", run["tokens_per_second"], "a second"))
    found.append(at_most(0, "goals of the replay that were missed", len(report["shortfalls"]), ""))
    return found


def main() -> int:
    began, began_cpu = time.perf_counter(), time.process_time()
    report = replay(
        Setup(
            requests=list(read_trace(ROOT / "examples" / "traces" / "azure_conversation_1h.csv.gz")),
            pool=read_pool(ROOT / "examples" / "pools" / "workstation.yaml"),
            model=MODELS["llama-3.1-70b"],
            gpu=GPUS["h200"],
            link="nvlink",
            gpus=8,
            active=2,
            cycles=None,
            rate=None,
            patience=30.0,
            seed=0,
        )
    )
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    return finish(record("replay", WHAT, rows(as_object(report), wall, cpu)))


if __name__ == "__main__":
    sys.exit(main())
