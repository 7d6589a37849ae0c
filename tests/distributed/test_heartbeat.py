"""The thread that ends a process whose main thread waits for a failed rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from splatcli.distributed.heartbeat import first_of
from splatcli.errors import DistributedError

ENDED = """
import sys
from torch.distributed import HashStore
from splatcli.distributed.heartbeat import Failure, HeartbeatMonitor
monitor = HeartbeatMonitor(HashStore(), 0, 1)
monitor._take(Failure([0], "it is gone"))
if len(sys.argv) > 1:
    sys.stderr = None
monitor._end()
"""


@pytest.mark.parametrize("words", [(), ("none",)], ids=["a full disk under stderr", "no stderr"])
def test_a_process_ends_whatever_its_stderr_is(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", ENDED, *words], stderr=full, check=False, timeout=120)
    assert done.returncode == DistributedError.exit_code


def test_a_message_names_few_of_many_ranks() -> None:
    words = [f"rank {rank}" for rank in range(100)]
    assert first_of(words[:3], ", ", [1]) == "rank 0, rank 1, rank 2"
    assert first_of(words, ", ", [97]).startswith("rank 97, rank 0, ")
    assert first_of(words, ", ").endswith("rank 7 and 92 others")
