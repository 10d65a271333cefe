"""A wire's packets by a clock of our own, and a link of tunnels where this machine can make one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import namespaces, wire
from benchmarks.namespaces import ADDRESSES, Impossible, two_nodes


def test_packets_arrive_at_the_rate_behind_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: clock.now))
    sender, source = socket.socketpair(type=socket.SOCK_DGRAM)
    target, receiver = socket.socketpair(type=socket.SOCK_DGRAM)
    with sender, source, target, receiver:
        for each in (source, receiver):
            each.setblocking(False)
        way = wire.Direction(source.fileno(), target.fileno(), rate=1000.0, delay_s=2.0)
        for packet in (b"a" * 500, b"b" * 250):
            sender.send(packet)
        way.take()
        assert way.give() == 2.5  # half a second to be sent, and two on its way
        clock.now += 2.5
        assert way.give() == 0.25 and receiver.recv(1000) == b"a" * 500
        clock.now += 0.25
        way.give()
        assert receiver.recv(1000) == b"b" * 250


def test_what_finds_the_queue_full_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "QUEUE", 1000)
    sender, source = socket.socketpair(type=socket.SOCK_DGRAM)
    with sender, source:
        source.setblocking(False)
        way = wire.Direction(source.fileno(), -1, rate=1e-3, delay_s=0.0)
        for _ in range(3):  # one that is being sent, one that waits behind its 600 bytes, one behind 1,200
            sender.send(b"x" * 600)
        way.take()
        assert len(way.under_way) == 2


@pytest.mark.processes
def test_without_netem_a_link_has_the_delay_and_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_slow_down", lambda *_: None)
    try:
        with two_nodes(20, 40.0) as nodes:
            server, client = (
                subprocess.Popen(
                    ["ip", "netns", "exec", node, sys.executable, "-Sc", program, ADDRESSES[1]],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for node, program in zip(reversed(nodes.names), (SERVER, CLIENT), strict=True)
            )
            with server, client:
                assert server.stdout.readline() == "listening\n"
                connected, sent = map(float, client.communicate("go\n", timeout=60)[0].split())
    except Impossible as reason:
        pytest.skip(str(reason))
    assert connected >= 0.08, "there and back"
    assert sent >= 0.08 + 500_000 * 8 / 20e6
    assert (
        f"terrazzo-{os.getpid()}-" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    )


SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    while connection.recv(65536):
        pass
    connection.sendall(b".")
"""
CLIENT = """
import socket, sys, time
sys.stdin.readline()
start = time.monotonic()
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connected = time.monotonic()
    connection.sendall(bytes(500_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(connected - start, time.monotonic() - connected)
"""
