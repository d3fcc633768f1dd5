import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from certificates import make_certificates
from dataset_rows import rollouts
from made_spans import make_request, make_rollout, make_span
from peer_processes import Peer, exporter, free_ports, go_collector, otelcol, rotel, rotel_agent, send
from served import QUICK, Served, wait_for

from spanmill.collector.journal import read
from spanmill.triplets.reader import read_triplets

pytestmark = pytest.mark.peer


def request(number: int) -> bytes:
    """A rollout of its own."""
    return make_request(*make_rollout(f"r{number}"))


def complete(out: Path, count: int) -> bool:
    """Whether so many rollouts are written."""
    return count == (len(rollouts(out, "rollout_id")) if list(out.glob("rollouts/*.parquet")) else 0)


def check_exactly_once(out: Path, count: int) -> None:
    """Every call of so many rollouts is in the dataset, once."""
    wait_for(lambda: complete(out, count), 60)
    expected = sorted(f"chatcmpl-r{number}-call-{turn}" for number in range(count) for turn in range(2))
    assert expected == sorted(read_triplets(out).collect()["call_id"].to_list())


def restarted(out: Path, service: Served, *options: str) -> Served:
    """The service again, on the ports of the one that was killed."""
    return Served(out, *QUICK, "--grpc", service.address, "--http", service.http_address, *options)


@pytest.mark.parametrize(
    ("scheme", "compression", "more"),
    [
        ("grpc", "none", ""),
        ("grpc", "gzip", ""),
        ("http", "none", ""),
        ("http", "gzip", "    encoding: json\n"),
        ("http", "zstd", ""),
    ],
)
def test_behind_the_go_collector(tmp_path: Path, scheme: str, compression: str, more: str) -> None:
    """Killed with kill -9 under load and started again after a while: every span is there, once."""
    otelcol()
    out = tmp_path / "out"
    with Served(out, *QUICK) as service:
        url = f"{scheme}://{service.address if scheme == 'grpc' else service.http_address}"
        peer = go_collector(tmp_path, exporter(url, compression, more))
        with peer:
            for number in range(20):
                send(peer.port, request(number))
            service.kill()
            for number in range(20, 40):
                send(peer.port, request(number))
            time.sleep(1)
            with restarted(out, service) as again:
                for number in range(40, 60):
                    send(peer.port, request(number))
                check_exactly_once(out, 60)
                assert [] == peer.dropped()
                assert 0 == again.stop()


@pytest.mark.parametrize(("scheme", "compression"), [("grpc", "none"), ("grpc", "gzip"), ("http", "gzip")])
def test_behind_rotel(tmp_path: Path, scheme: str, compression: str) -> None:
    """The same with a collector that does other things with the same answers."""
    rotel()
    out = tmp_path / "out"
    with Served(out, *QUICK) as service:
        url = f"{scheme}://{service.address if scheme == 'grpc' else service.http_address}"
        peer = rotel_agent(tmp_path, url, compression)
        with peer:
            for number in range(20):
                send(peer.port, request(number))
            wait_for(lambda: complete(out, 20), 60)
            service.kill()
            for number in range(20, 40):
                send(peer.port, request(number))
            time.sleep(1)
            with restarted(out, service) as again:
                check_exactly_once(out, 40)
                assert 0 == again.stop()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_over_tls_with_certificates_and_tokens(tmp_path: Path, scheme: str) -> None:
    """As the Go collector is set up for it; one without the token loses its spans at once, and says so."""
    otelcol()
    folder = make_certificates(tmp_path)
    (folder / "tokens").write_text("old\nnew\n")
    options = [
        "--tls-cert",
        "server.pem",
        "--tls-key",
        "server.key",
        "--tls-client-ca",
        "ca.pem",
        "--token-file",
        "tokens",
    ]
    options = [option if option.startswith("--") else str(folder / option) for option in options]
    out = tmp_path / "out"
    with Served(out, *QUICK, *options) as service:
        address = service.address if scheme == "grpc" else f"https://{service.http_address}"
        for token in ("new", "wrong"):
            peer = go_collector(
                tmp_path,
                f"""  otlp_{scheme}:
    endpoint: "{address}"
    compression: gzip
    tls: {{ca_file: "{folder}/ca.pem", cert_file: "{folder}/client.pem", key_file: "{folder}/client.key"}}
    headers: {{authorization: "Bearer {token}"}}
""",
            )
            with peer:
                for number in range(3):
                    send(peer.port, request(number))
                if token == "new":
                    check_exactly_once(out, 3)
                    assert [] == peer.dropped()
                else:
                    wait_for(peer.dropped)
        assert 0 == service.stop()
    assert 3 == len(rollouts(out, "rollout_id"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_fills_up_loses_nothing(small_disk: Path, tmp_path: Path) -> None:
    """Senders are told to wait before it is full; once there is room all they have goes in, by itself."""
    otelcol()
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(9 << 20))
    out = small_disk / "out"
    with Served(out, *QUICK, "--min-free-mib", "4") as service:
        peer = go_collector(tmp_path, exporter(f"grpc://{service.address}"))
        with peer:
            url = f"http://{service.http_address}"
            sent = extra = 0
            while extra < 4:
                text = {"note": os.urandom(100_000).hex()}
                root = make_span(f"r{sent}", "extra", "root", attributes=text)
                send(peer.port, make_request(*make_rollout(f"r{sent}"), root))
                sent += 1
                extra += httpx.get(f"{url}/readyz").status_code == 503
            refused = 'spanmill_requests_rejected_total{reason="refused"} 0.0'
            wait_for(lambda: refused not in httpx.get(f"{url}/metrics").text)
            assert 1 << 20 < os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            ballast.unlink()
            check_exactly_once(out, sent)
            assert [] == peer.dropped()
        assert 0 == service.stop()


def test_the_configuration_that_is_shipped(tmp_path: Path) -> None:
    """otel-config.yaml as it stands, but for the ports: the backend and spanmill get every span, and one that is away
    holds the other one up in nothing.
    """
    binary = otelcol()
    text = (Path(__file__).parents[2] / "otel-config.yaml").read_text()
    backend_out, out = tmp_path / "backend", tmp_path / "out"
    with Served(backend_out, *QUICK) as backend, Served(out, *QUICK) as service:
        ports = free_ports(3)
        for old, new in (
            ("127.0.0.1:14317", service.address),
            ("127.0.0.1:24317", backend.address),
            ("127.0.0.1:4317", f"127.0.0.1:{ports[0]}"),
            ("127.0.0.1:4318", f"127.0.0.1:{ports[1]}"),
        ):
            # The addresses in comments are for people.
            assert f"endpoint: {old}" in text
            text = text.replace(f"endpoint: {old}", f"endpoint: {new}")
        config = tmp_path / "otel-config.yaml"
        config.write_text(text + "  telemetry:\n    metrics: {level: none}\n")
        with Peer([binary, "--config", config], tmp_path / "otelcol.log", ports[0]) as peer:
            for number in range(10):
                send(ports[0], request(number))
            check_exactly_once(backend_out, 10)
            service.kill()
            for number in range(10, 20):
                send(ports[0], request(number))
            check_exactly_once(backend_out, 20)
            with restarted(out, service) as again:
                check_exactly_once(out, 20)
                backend.kill()
                for number in range(20, 30):
                    send(ports[0], request(number))
                check_exactly_once(out, 30)
                assert [] == peer.dropped()
                assert 0 == again.stop()


@pytest.mark.parametrize("kind", ["go", "rotel"])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_in_front_of_another_collector(tmp_path: Path, kind: str, scheme: str) -> None:
    """With --forward: what spanmill acknowledges also reaches the collector behind it, and through it the next."""
    (otelcol if kind == "go" else rotel)()
    first_out, last_out = tmp_path / "first", tmp_path / "last"
    with Served(last_out, *QUICK) as last:
        url = f"grpc://{last.address}"
        peer = go_collector(tmp_path, exporter(url)) if kind == "go" else rotel_agent(tmp_path, url)
        target = f"{scheme}://127.0.0.1:{peer.port if scheme == 'grpc' else peer.http_port}"
        with peer, Served(first_out, *QUICK, "--forward", target) as first:
            for number in range(20):
                first.send(request(number))
            check_exactly_once(first_out, 20)
            check_exactly_once(last_out, 20)
            assert 0 == first.stop()
        assert 0 == last.stop()
    assert 20 == len([entry for entry in read(first_out / ".journal") if entry.body])
