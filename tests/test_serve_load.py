"""`moejax-serve` under load, as a process: clients that vanish, and an end in the midst of work."""

import asyncio
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

CLIENTS = 500


@contextlib.contextmanager
def serving(cache: pathlib.Path, log: pathlib.Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of the built-in model with its port; killed at the end if it still runs."""
    command = [sys.executable, "-m", "moejax_serving.cli", "--port", "0", "--dtype", "float32"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--memory-budget", "200MB"]
    command += ["--max-queued-requests", "600"]
    environment = {**os.environ, "MOEJAX_CACHE": str(cache)}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found is not None, log.read_text()
            yield process, int(found[1])
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
        + data
    )


async def vanish(port: int, seed: int, gate: asyncio.Semaphore) -> int:
    """Asks for a long stream, reads some of it and is gone; returns how many chunks it has seen."""
    rng = random.Random(seed)
    body = {"prompt": f"Once {seed} upon a time", "max_tokens": 400, "ignore_eos": True}
    async with gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request({**body, "stream": seed % 5 != 0}))
        seen, wanted = 0, rng.choice([0, 1, 1, 3])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0, 3)):
                while seen < wanted and (line := await reader.readline()):
                    seen += line.startswith(b"data: {")
        if rng.random() < 0.5:
            writer.transport.abort()  # a reset rather than a close
        writer.close()
        return seen


@pytest.mark.shows("server", "500 clients that vanish in the middle leave nothing behind")
def test_500_clients_that_vanish_leave_nothing(
    demo_cache: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async def run(port: int) -> list[int]:
        gate = asyncio.Semaphore(100)
        return await asyncio.gather(*(vanish(port, seed, gate) for seed in range(CLIENTS)))

    with serving(demo_cache, tmp_path / "log") as (process, port):
        files = len(os.listdir(f"/proc/{process.pid}/fd"))
        seen = asyncio.run(run(port))
        assert sum(n > 0 for n in seen) > 10
        deadline = time.monotonic() + 60
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while (held := [metric(port, f"vllm:{name}") for name in names]) != [0, 0, 0]:
            assert time.monotonic() < deadline, held
            time.sleep(0.1)
        aborted = metric(port, "vllm:request_success_total")
        assert aborted > 0
        assert len(os.listdir(f"/proc/{process.pid}/fd")) <= files + 2
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


async def stay(port: int, number: int, started: asyncio.Event) -> tuple[int, int]:
    """Reads a stream to its end; returns how many tokens came, and how often it ended."""
    body = {"prompt": f"Chapter {number}", "max_tokens": 60, "ignore_eos": True, "stream": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request({**body, "stream_options": {"include_usage": True}}))
    assert b" 200 " in await reader.readline()
    tokens = ends = 0
    async for line in reader:
        if line.startswith(b"data: {"):
            started.set()
            event = json.loads(line[6:])
            assert "error" not in event
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        ends += line.startswith(b"data: [DONE]")
    writer.close()
    return tokens, ends


@pytest.mark.shows("server", "SIGTERM: every request that was admitted is answered to its end")
def test_sigterm_under_load_loses_no_admitted_request(
    demo_cache: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    async def run(process: subprocess.Popen[str], port: int) -> list[tuple[int, int]]:
        started = asyncio.Event()
        tasks = [asyncio.create_task(stay(port, number, started)) for number in range(40)]
        await started.wait()
        while sum(await asyncio.to_thread(queue_of, port)) < 40:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    with serving(demo_cache, tmp_path / "log") as (process, port):
        assert asyncio.run(run(process, port)) == [(60, 1)] * 40
        assert process.wait(timeout=30) == 0


def queue_of(port: int) -> list[float]:
    """Requests that run, wait, and have ended."""
    names = ("num_requests_running", "num_requests_waiting", "request_success_total")
    return [metric(port, f"vllm:{name}") for name in names]
