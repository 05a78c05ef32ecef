"""Replay: three runs under the real policy keep their promises."""

import json
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ema_cli.pool_file import read_pool
from ema_cli.replay import replay_command
from ema_cli.replay_report import as_object, picture
from ema_cli.serving.instance import Instance
from ema_cli.serving.node import Node, gpu_id
from ema_cli.serving.presets import GPUS, MODELS, kv_share
from ema_cli.serving.replay import RUNS, Setup, deal, replay
from ema_cli.serving.run import Run
from ema_cli.serving.step import Demand
from ema_cli.serving.trace import read_trace
from ema_core.errors import InvalidInput
from ema_core.resolve import GpuFacts, resolve

EXAMPLES = Path(__file__).parents[2] / "examples"
POOL = EXAMPLES / "pools" / "workstation.yaml"
TRACE = EXAMPLES / "traces" / "azure_conversation_10min.csv"
MODEL, GPU = MODELS["llama-3.1-70b"], GPUS["h200"]
GI = 2**30

app = typer.Typer()
app.command()(replay_command)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(
        requests=list(read_trace(TRACE)),
        pool=read_pool(POOL),
        model=MODEL,
        gpu=GPU,
        link="nvlink",
        gpus=4,
        active=1,
        cycles=None,
        rate=None,
        patience=30.0,
        seed=0,
    )


def test_the_default_load_shows_what_it_promises(setup: Setup) -> None:
    report = replay(setup)
    static, borrowing, double = report.outcomes
    assert report.shortfalls == []
    assert static.served <= 0.85 * static.offered
    assert borrowing.served >= 0.96 * double.served
    for outcome, predicted in zip(report.outcomes, report.predicted, strict=True):
        assert outcome.served == pytest.approx(predicted, rel=0.05)


def test_every_request_is_accounted_for_once(setup: Setup) -> None:
    for outcome in replay(setup).outcomes:
        assert outcome.offered == len(setup.requests)
        assert outcome.served + outcome.gave_up + outcome.unfinished == outcome.offered
        assert len(outcome.waits) == outcome.offered
        assert len(outcome.latencies) == outcome.served
        assert outcome.unfinished >= 0


def test_memory_is_never_more_than_there_is(setup: Setup) -> None:
    report = replay(setup)
    most = resolve(setup.pool, {gpu_id(0): GpuFacts("H200", GPU.memory)}).max_per_gpu[gpu_id(0)]
    for name, outcome in zip(RUNS, report.outcomes, strict=True):
        for _, gpus in outcome.samples:
            lent = sum(gpu.lent for gpu in gpus)
            assert lent <= sum(gpu.granted for gpu in gpus) <= lent + setup.pool.spec.reclaim.host_memory
            for gpu in gpus:
                if name != "twice the memory":
                    assert MODEL.weights + GPU.reserved + gpu.local + gpu.lent <= GPU.memory
                assert gpu.lent <= most
                assert gpu.borrowed <= gpu.granted


def test_more_memory_never_serves_fewer(setup: Setup) -> None:
    small = replay(setup)
    more = replay(replace(setup, rate=small.rate, gpu=replace(GPU, memory=GPU.memory + 4 * GI)))
    for before, after in zip(small.outcomes, more.outcomes, strict=True):
        assert after.served >= 0.99 * before.served
    assert small.outcomes[0].served <= small.outcomes[1].served <= 1.01 * small.outcomes[2].served


def test_the_same_seed_gives_the_same_report_and_another_one_does_not(setup: Setup) -> None:
    setup = replace(setup, requests=setup.requests[:800], rate=0.4)
    first = as_object(replay(setup))
    assert as_object(replay(setup)) == first
    other = as_object(replay(replace(setup, seed=1, active=2)))
    assert other["runs"] != first["runs"]


def test_rate_multiplies_the_load(setup: Setup) -> None:
    (slow, long), (fast, short) = deal(setup, 1.0), deal(setup, 2.0)
    assert long == pytest.approx(2 * short)
    assert sum(map(len, slow)) == sum(map(len, fast)) == len(setup.requests)


def test_tenants_take_turns(setup: Setup) -> None:
    dealt, duration = deal(replace(setup, cycles=2), 1.0)
    for index, requests in enumerate(dealt):
        turns = {int(request.arrival / duration * 8) for request in requests} - {8}
        assert turns == {index, index + 4}


def test_the_hour_on_eight_gpus_is_fast_enough(setup: Setup) -> None:
    """The whole hour has 4.7 times the requests and 20 s; the limit here leaves room for a busy machine."""
    began = time.process_time()
    replay(replace(setup, gpus=8, active=2))
    assert time.process_time() - began < 6


def test_a_lender_gets_its_memory_back_after_the_copies_took_their_time(setup: Setup) -> None:
    share = kv_share(MODEL, GPU)
    policy = resolve(setup.pool, {gpu_id(index): GpuFacts("H200", GPU.memory) for index in range(2)})
    node = Node(
        gpus=2, spec=GPU, model=MODEL, share=share, link=GPU.nvlink, pool=policy, limit=40 * GI, max_traffic=None
    )
    node.want(1, Demand(share, 4 * GI), 0.0)
    assert node.lent(0) == node.memory(1, 0.0).borrowed == 4 * GI
    assert node.memory(1, 0.0).paths[0].rate == GPU.nvlink
    node.want(0, Demand(share, 0), 10.0)  # nobody else has room: to host memory
    assert node.lent(0) == 0
    assert node.memory(1, 10.0).paths[0].rate == GPU.pcie
    (seconds,) = node.traffic.reclaims
    assert seconds == pytest.approx(4 * GI / GPU.pcie)
    assert node.memory(0, 10.0).local <= share - 4 * GI
    assert node.memory(0, 10.0 + seconds).local > share - 64 * 2**20
    assert node.traffic.moved == 4 * GI


def test_a_cap_per_lender_slows_its_borrowers(setup: Setup) -> None:
    policy = resolve(setup.pool, {gpu_id(index): GpuFacts("H200", GPU.memory) for index in range(2)})
    share = kv_share(MODEL, GPU)
    node = Node(gpus=2, spec=GPU, model=MODEL, share=share, link=GPU.nvlink, pool=policy, limit=GI, max_traffic=10**9)
    node.want(1, Demand(share, GI), 0.0)
    assert node.memory(1, 0.0).paths[0].rate == pytest.approx(10**9)


def test_a_run_without_requests_for_some_instances_ends(setup: Setup) -> None:
    instances = [Instance(model=MODEL, gpu=GPU, share=kv_share(MODEL, GPU)) for _ in range(2)]
    outcome = Run(instances, [list(setup.requests[:5]), []], 300.0, None).finish()
    assert outcome.served == 5


def test_the_picture_is_svg_with_axes_units_and_legend(setup: Setup) -> None:
    report = replay(replace(setup, requests=setup.requests[:600], rate=0.35))
    root = ET.fromstring(picture(report))  # noqa: S314 (made here)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for wanted in ("lent to others", "borrowed (elsewhere)", "own weights", "GPU 3"):
        assert wanted in texts
    assert any("GiB" in text for text in texts)
    assert any(text.startswith("time (") for text in texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polygon"))) >= 12


def test_the_command_prints_one_json_object(tmp_path: Path) -> None:
    out = tmp_path / "r.svg"
    result = CliRunner().invoke(
        app, [str(TRACE), "--pool", str(POOL), "--gpus", "4", "--rate", "0.3", "--json", "--svg", str(out)]
    )
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["runs"]
    assert set(runs) == set(RUNS)
    assert runs["borrowing"]["reclaims"] > 0
    assert out.read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a100-80g"], "--model: got 'Llama-3.1-70B'; expected a model that fits"),
        (["--gpu", "b9000"], "--gpu: got 'b9000'"),
        (["--rate", "0"], "--rate: got 0.0"),
        (["--rate", "nan"], "--rate: got nan"),
        (["--active", "9"], "--active: got 9; expected at most 8"),
        (["--patience", "30"], "--patience: got '30'; expected a duration"),
        (["--link", "wifi"], "link: got 'wifi'"),
        (["--pool", "/nowhere.yaml"], "pool: got '/nowhere.yaml'; expected a readable file"),
        (["--svg", "/nowhere/x.svg"], "--svg: got '/nowhere/x.svg'"),
    ],
)
def test_wrong_arguments_are_refused_with_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    trace = tmp_path / "short.csv"
    trace.write_text("\n".join(TRACE.read_text("utf-8").splitlines()[:20]), "utf-8")
    svg = [] if "--svg" in arguments else ["--svg", str(tmp_path / "x.svg")]
    result = CliRunner().invoke(app, [str(trace), "--pool", str(POOL), "--rate", "1", *svg, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "a YAML document"), ("", "at least one MemoryPool"), ("kind: Pod", "spec|kind|metadata")],
)
def test_wrong_pool_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(InvalidInput, match=message):
        read_pool(path)


def test_two_pools_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.read_text("utf-8") + "---\n" + POOL.read_text("utf-8").replace("workstation", "b"), "utf-8")
    with pytest.raises(InvalidInput, match="just one MemoryPool"):
        read_pool(path)
