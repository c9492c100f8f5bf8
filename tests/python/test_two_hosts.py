"""Ranks on two hosts, as far as one machine can have them: two network namespaces joined by a cable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RANK_PROGRAM = Path(__file__).parents[1] / "support" / "two_hosts_rank.py"


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command (Debian: iproute2)")
    names = (f"fastsync-a-{os.getpid()}", f"fastsync-b-{os.getpid()}")
    try:
        made = ip("netns", "add", names[0], check=False)
        if made.returncode != 0:
            pytest.skip(f"may not make network namespaces: {made.stderr.strip()}")
        ip("netns", "add", names[1])
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth1", "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.211.0.{index + 1}/24", "dev", f"veth{index}")
            ip("-n", name, "link", "set", f"veth{index}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def test_auto_uses_gloo_between_hosts_and_failures_cross_them(hosts: tuple[str, str], tmp_path: Path) -> None:
    outs = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, RANK_PROGRAM, str(rank), tmp_path / "store", outs[rank]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(hosts)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    source, receiver = (json.loads(out.read_text()) for out in outs)
    assert source[:2] == receiver[:2] == [[1, "gloo"], [2, "gloo"]]
    assert receiver[2] == ["ValueError", "boom"]
    assert source[2] == ["PeerFailed", "rank 1 failed: ValueError: boom"]
    assert source[3] == receiver[3] == [3, "gloo"]
    for seen in (source, receiver):
        assert seen[4][0] == "CommError" and "another host" in seen[4][1] and "rank 1" in seen[4][1]
