"""How long a replay of one hour of a production service takes on one core, and what it shows.

    python bench/replay.py [--out bench/results/replay.json]

Replays 19,366 requests on 8 GPUs three times (static partition, borrowing, twice the memory). Goal: under 20 s.
"""

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from ema_cli.pool_file import read_pool
from ema_cli.replay_report import as_object
from ema_cli.serving.presets import GPUS, MODELS
from ema_cli.serving.replay import Setup, replay
from ema_cli.serving.trace import read_trace

ROOT = Path(__file__).parents[1]
GOAL_SECONDS = 20.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "replay.json")
    out = parser.parse_args().out
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
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "goal_seconds": GOAL_SECONDS,
        "report": as_object(report),
    }
    out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(f"three runs of {len(report.setup.requests)} requests: {wall:.1f} s (goal {GOAL_SECONDS:.0f} s); {out}")
    return int(cpu > GOAL_SECONDS or bool(report.shortfalls))


def processor() -> str:
    """The processor's name, as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
