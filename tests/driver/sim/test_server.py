"""The device process: its life, its guests, and what a hostile one can do."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from driver.gates import window
from driver.sim.conftest import MIB, SMALL
from ema_core.ids import HOST
from ema_driver.errors import ContextLost, InvalidUse
from ema_driver.protocol import Copy, Wait
from ema_driver.sim import SimConfig, SimDriver, SimServer, start, wire


def _gone(path: Path) -> bool:
    end = time.monotonic() + 5
    while path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not path.exists()


def test_a_running_server_is_used_again_and_ends_after_its_last_session(tmp_path: Path) -> None:
    first = start(SMALL, tmp_path)
    second = start(SMALL, tmp_path)
    with pytest.raises(InvalidUse, match="another configuration"):
        start(SimConfig(), tmp_path)
    first.close()
    with SimDriver.connect(second.socket) as driver:
        second.close()
        time.sleep(SMALL.linger * 2)
        assert driver.devices()
    assert _gone(tmp_path / "sim.sock")
    start(SMALL, tmp_path).stop()
    assert (tmp_path / "sim.log").read_text() == ""


def test_the_server_outlives_whoever_started_it(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from driver.sim.conftest import SMALL
from ema_driver.sim import start
server = start(SMALL, Path({str(tmp_path)!r}))
print("up", flush=True)
signal.pause()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"up\n"
        with SimDriver.connect(tmp_path / "sim.sock") as client:
            at, _ = window(client, client.devices()[0].id, MIB)
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            time.sleep(SMALL.linger * 2)
            client.write(at, b"alive")
            assert client.read(at, 5) == b"alive"
    assert _gone(tmp_path / "sim.sock")


def test_sessions_of_a_stopped_server_are_lost(tmp_path: Path) -> None:
    server = start(SMALL, tmp_path)
    driver = SimDriver.connect(server.socket)
    server.stop()
    with pytest.raises(ContextLost):
        driver.memory()
    with pytest.raises(OSError, match="No such file"):
        SimDriver.connect(server.socket)
    driver.close()
    driver.close()


def test_a_socket_path_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    start(SMALL, folder).stop()


def test_a_guest_sees_its_gpu_only(driver: SimDriver) -> None:
    own, other, _ = (device.id for device in driver.devices())
    with SimDriver.from_fd(driver.guest(own)) as guest:
        assert [device.id for device in guest.devices()] == [own]
        assert set(guest.memory()) == {own, HOST}
        assert {place for link in guest.links() for place in (link.source, link.target)} == {own, HOST}
        for place in (other, HOST):
            with pytest.raises(InvalidUse):
                guest.create(place, MIB)
        foreign = driver.export(driver.create(other, MIB))
        for use in (
            lambda: guest.stream(other),
            lambda: guest.guest(own),
            lambda: guest.adopt(foreign, MIB),
            guest.shutdown,
        ):
            with pytest.raises(InvalidUse):
                use()
        os.close(foreign)
        handle = guest.create(own, MIB)
        shared = guest.export(handle)
        adopted = driver.adopt(shared, MIB)
        os.close(shared)
        assert adopted.place == own
        driver.release([adopted])
    assert driver.memory()[own].used == 0


def test_a_view_is_the_memory_itself_and_holds_it(driver: SimDriver) -> None:
    gpu = driver.devices()[0].id
    size = 64 << 10
    at = driver.reserve(2 * size)
    pieces = [driver.create(gpu, size), driver.create(gpu, size)]
    driver.map([(at, pieces[0])])
    with pytest.raises(InvalidUse, match="nothing is mapped"):
        driver.view(at, 2 * size)
    driver.unmap([at])
    tail = driver.reserve(2 * size)
    driver.map([(at, pieces[0]), (type(at)(at + size), pieces[1]), (tail, pieces[1])])
    view = driver.view(at + 5, 2 * size - 5)
    view[size - 5 : size] = b"shows"
    assert driver.read(tail, 5) == b"shows"
    driver.unmap([at, type(at)(at + size), tail])
    driver.release(pieces)
    assert driver.memory()[gpu].used == 2 * size
    view.release()
    assert driver.memory()[gpu].used == 0


def test_malformed_messages_cost_only_their_own_session(driver: SimDriver) -> None:
    gpu = driver.devices()[0].id
    rand = random.Random(5)
    valid = [
        wire.encode(wire.Hello(1, 1)),
        wire.encode(wire.Create(1, gpu, 4096, 2)),
        wire.encode(wire.Map(1, ((1, 1), (2, 2)))),
        wire.encode(wire.Enqueue(1, (wire.CopyOp(1, 2, 3), wire.WaitOp(0, 0, 0)))),
        wire.encode(wire.Launch(4)),
        wire.encode(wire.OpenStream(1, gpu)),
        wire.encode(wire.Synchronize(1, 1, 0.1)),
        wire.encode(wire.Adopt(1, 4096)),
        wire.encode(wire.RegisterPage(1, 4096)),
        wire.IN_FILE,
    ]
    read, write = os.pipe()
    for _ in range(400):
        body = bytearray(rand.choice(valid))
        for _ in range(rand.randrange(3)):
            body[rand.randrange(len(body))] = rand.randrange(256)
        with socket.socket(fileno=driver.guest(gpu)) as link:
            try:
                for _ in range(3):
                    socket.send_fds(link, [bytes(body)], [read] * rand.randrange(3))
            except OSError:
                continue
    os.close(read)
    os.close(write)
    assert driver.memory()[gpu].used == 0
    stream = driver.stream(gpu)
    assert stream.done()


def test_a_session_that_breaks_the_rules_is_told_why(driver: SimDriver) -> None:
    guest = SimDriver.from_fd(driver.guest(driver.devices()[0].id))
    stream = guest.stream(guest.devices()[0].id)
    graph = stream.instantiate([])
    graph._launch = wire.encode(wire.Launch(99))
    graph.launch()
    with pytest.raises(ContextLost, match=r"Launch: KeyError\(99\)"):
        guest.memory()
    guest.close()


def test_large_batches_travel_in_one_call(driver: SimDriver) -> None:
    gpu = driver.devices()[0].id
    page = driver.words(4)
    stream = driver.stream(gpu)
    at, _ = window(driver, gpu, 4096)
    stream.enqueue([Copy(at + i % 64, at + 2048, 1) for i in range(20_000)])
    stream.enqueue([Wait(page, 0, 1)])
    assert not stream.synchronize(0.5)
    page.store(0, 1)
    assert stream.synchronize(5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"gpus": []}, "gpus: empty"),
        ({"gpus": [{"memory": "4Gi"}]}, r"gpus\[0\].memory: '4Gi' is wrong: Expected `int`"),
        ({"gpus": [{"memory": -1}]}, r"gpus\[0\].memory: -1 is wrong: Expected `int` >= 0"),
        ({"gpus": [{"memory": 10, "reserved": 10}]}, "reserved: 10 bytes of 10; must be less than memory"),
        ({"gpu": 3}, "unknown field `gpu`"),
        ({"link": "ethernet"}, "link: 'ethernet' is wrong: Invalid enum value"),
        ({"granularity": 5000}, "granularity: 5000 is wrong: Expected `int` that's a multiple of 4096"),
        ({"nvlink_rate": 0}, "nvlink_rate: 0 is wrong"),
        ({"faults": [{"kind": "lost", "gpu": 9}]}, r"faults\[0\]: no GPU 9; there are 4"),
        ({"faults": [{"kind": "tired", "gpu": 0}]}, "Invalid value 'tired'"),
        ({"links": [{"source": 0, "target": 7, "kind": "none"}]}, r"links\[0\]: no GPU 7"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field_and_value(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimConfig.parse(data)


def test_a_configuration_can_be_written_as_plain_data() -> None:
    data = {
        "gpus": [{"count": 2, "memory": 16 * MIB}, {"product": "Big", "memory": 80 * MIB}],
        "links": [{"source": 0, "target": 1, "kind": "pcie", "rate": 1000}],
        "faults": [{"kind": "slow-link", "source": -1, "target": 0, "factor": 2}],
    }
    config = SimConfig.parse(data)
    assert config.gpu_count == 3
    assert config.links[0].rate == 1000
    assert msgspec.json.decode(msgspec.json.encode(config), type=SimConfig) == config


def test_a_pair_without_a_path_is_not_claimed_and_a_copy_over_it_is_a_fault(
    serve: Callable[[SimConfig], SimServer],
) -> None:
    config = SimConfig.parse({**msgspec.to_builtins(SMALL), "links": [{"source": 0, "target": 1, "kind": "none"}]})
    with SimDriver.connect(serve(config).socket) as driver:
        a, b, _ = (device.id for device in driver.devices())
        assert all((link.source, link.target) != (a, b) for link in driver.links())
        to, of = window(driver, b, MIB)[0], window(driver, a, MIB)[0]
        stream = driver.stream(a)
        stream.enqueue([Copy(to, of, MIB)])
        with pytest.raises(ContextLost, match="no path"):
            stream.synchronize(5)
