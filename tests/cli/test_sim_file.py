"""sim.yaml: quantities and durations, all wrong fields at once."""

from pathlib import Path

import pytest
import yaml

from ema_cli.sim_file import load_sim, read_sim
from ema_core.errors import InvalidInput
from ema_driver.sim.config import SimConfig
from ema_driver.sim.faults import SlowLink

FULL = """
gpus:
  - {count: 2, memory: 16Gi, reserved: 450Mi}
  - {product: big, memory: 80Gi, numa: 1}
hostMemory: 64Gi
granularity: 2Mi
link: pcie
links: [{source: 0, target: 2, kind: nvlink, rate: 400G}]
pcieRate: 25G
latency: 5us
linkDelays: false
seed: 3
faults: [{kind: slow-link, source: 0, target: 1, factor: 4}]
linger: 2s
"""


def test_everything_is_read() -> None:
    config = load_sim(yaml.safe_load(FULL))
    assert [(group.count, group.memory) for group in config.gpus] == [(2, 16 << 30), (1, 80 << 30)]
    assert config.gpus[0].reserved == 450 << 20
    assert config.links[0].rate == 400_000_000_000
    assert (config.pcie_rate, config.link_delays, config.seed, config.linger) == (25_000_000_000, False, 3, 2.0)
    assert config.latency == pytest.approx(5e-6)
    assert config.faults == (SlowLink(source=0, target=1, factor=4),)


@pytest.mark.parametrize("document", [None, {}])
def test_an_empty_file_is_the_default_server(document: object) -> None:
    assert load_sim(document) == SimConfig()


@pytest.mark.parametrize("text", ["4GB", "4G ", "-1", "-1Gi", "50 %", ""])
@pytest.mark.parametrize("field", ["hostMemory", "granularity", "nvlinkRate", "pcieRate", "localRate"])
def test_every_place_that_takes_bytes_refuses_what_is_no_quantity(field: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field}: got {text!r}; expected a quantity"):
        load_sim({field: text})


def test_all_wrong_fields_are_reported_at_once() -> None:
    with pytest.raises(InvalidInput) as refused:
        load_sim(
            {
                "gpus": [{"memory": "1GB", "counts": 2}],
                "linkDelays": "perhaps",
                "latency": 3,
                "faults": [{"kind": "gremlin"}, {"kind": "xid", "gpu": 0, "code": 0}],
            }
        )
    fields = [error.field for error in refused.value.errors]
    assert sorted(fields) == [
        "faults[0].kind",
        "faults[1].code",
        "gpus[0].counts",
        "gpus[0].memory",
        "latency",
        "linkDelays",
    ]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"gpus": []}, "gpus"),
        ({"gpus": [{"count": 0}]}, "count"),
        ({"gpus": [{"memory": "1Gi", "reserved": "2Gi"}]}, "reserved"),
        ({"link": "wifi"}, "link"),
        ({"links": [{"source": 0, "target": 9, "kind": "nvlink"}]}, "no GPU 9"),
        ({"granularity": "5000"}, "granularity"),
    ],
)
def test_what_the_simulator_refuses_is_named(document: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_sim(document)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--sim: got .*; expected a readable file"):
        read_sim(tmp_path / "nowhere.yaml")
    (tmp_path / "x.yaml").write_text("a: [", "utf-8")
    with pytest.raises(InvalidInput, match="expected a YAML document"):
        read_sim(tmp_path / "x.yaml")
    (tmp_path / "y.yaml").write_text("seed: 4\n", "utf-8")
    assert read_sim(tmp_path / "y.yaml").seed == 4
