"""Starts a script once per rank of a small gloo group."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import environment_of_its_own


def run_ranks(script: Path, folder: Path, world_size: int, **options) -> tuple[list[dict], list[int]]:
    """
    Results and exit codes of all ranks of `script RANK WORLD_SIZE PORT FOLDER OPTIONS`, whose last line is JSON.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = environment_of_its_own() | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), str(port), str(folder), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    results = [json.loads(out.splitlines()[-1]) if out.strip() else {"stderr": err[-3000:]} for out, err in outputs]
    return results, [process.returncode for process in processes]
