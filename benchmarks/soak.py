"""Many streams for a long time on a server of its own: errors, leaks, compiles.

    python benchmarks/soak.py --streams 100 --minutes 10

Starts `moejax-serve` with the built-in model. Each client asks again and again, with prompts of
several lengths that partly begin the same; some go away in the middle, some ask for
log-probabilities, penalties or several answers. Appends a line to results/soak.jsonl; fails if a
request failed, if something is still held at the end, or if memory grew by more than a tenth in the
last two thirds of the time.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from stamp import record, run_script, stamp
from tqdm import tqdm

WORDS = "the sea was calm and old men told stories of ships that never came home again".split()
GROWTH = 1.10


class Counts:
    """What the clients saw."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.finished = self.left = self.tokens = 0
        self.first_token: list[float] = []
        self.between_tokens: list[float] = []


def make_body(rng: random.Random) -> dict[str, Any]:
    """A request of some kind."""
    prompt = " ".join(WORDS[: rng.randint(1, len(WORDS))] * rng.randint(1, 8))
    body: dict[str, Any] = {
        "prompt": prompt + " " + " ".join(rng.choices(WORDS, k=rng.randint(1, 20))),
        "max_tokens": rng.randint(8, 80),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if rng.random() < 0.2:
        body |= {"logprobs": rng.randint(0, 5)}
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    if rng.random() < 0.1:
        body |= {"n": 2}
    if rng.random() < 0.2:
        body |= {"stop": [" again", "xyz"], "echo": True}
    return body


async def ask(port: int, rng: random.Random, counts: Counts) -> None:
    """One request, read to its end or left in the middle."""
    body = make_body(rng)
    data = json.dumps(body).encode()
    leave_after = rng.randint(1, 20) if rng.random() < 0.1 else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = last = time.monotonic()
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        status = await reader.readline()
        if b" 200 " not in status:
            counts.errors.append((status + await reader.read()).decode()[-300:])
            return
        seen, is_done, reasons = 0, False, 0
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                is_done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                counts.errors.append(line.decode()[:300])
                return
            now = time.monotonic()
            if event["choices"]:
                (counts.between_tokens if seen else counts.first_token).append(now - last)
                last = now
                seen += 1
            reasons += sum(choice["finish_reason"] is not None for choice in event["choices"])
            if event.get("usage"):
                counts.tokens += event["usage"]["completion_tokens"]
            if seen == leave_after:
                counts.left += 1
                return
        if not is_done or reasons != body.get("n", 1):
            counts.errors.append(f"cut after {seen} chunks and {now - start:.1f} s: {body}"[:300])
        counts.finished += 1
    except OSError as error:
        counts.errors.append(repr(error))
    finally:
        writer.close()


async def client(port: int, seed: int, until: float, counts: Counts) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until and len(counts.errors) < 100:
        await ask(port, rng, counts)


async def watch(pid: int, port: int, until: float, samples: list[dict[str, float]]) -> None:
    """Samples the server's memory, file descriptors and threads."""
    bar = tqdm(total=round(until - time.monotonic()), unit="s", disable=None)
    while (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(5.0, left))
        samples.append(sample(pid))
        bar.update(5)
    bar.close()


def sample(pid: int) -> dict[str, float]:
    process = pathlib.Path("/proc") / str(pid)
    status = (process / "status").read_text()
    return {
        "rss_mib": int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024,
        "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
        "fds": len(os.listdir(process / "fd")),
    }


def metric(port: int, name: str) -> float:
    """The sum of a series, over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


async def load(pid: int, port: int, streams: int, seconds: float) -> tuple[Counts, list[Any]]:
    counts, samples = Counts(), []
    until = time.monotonic() + seconds
    clients = (client(port, seed, until, counts) for seed in range(streams))
    await asyncio.gather(watch(pid, port, until, samples), *clients)
    return counts, samples


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=100, help="clients at once (default: 100)")
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: 10)")
    parser.add_argument("serve", nargs="*", help="further arguments of moejax-serve, after --")
    args = parser.parse_args()

    command = [sys.executable, "-m", "moejax_serving.cli", "--port", "0", *args.serve]
    log = pathlib.Path(tempfile.mkdtemp()) / "server.log"
    print(f"the server's log: {log}", file=sys.stderr)
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None, log.read_text()
        port = int(found[1])
        compiles = metric(port, "moejax:jit_compiles_total")
        counts, samples = asyncio.run(load(process.pid, port, args.streams, 60 * args.minutes))
        deadline = time.monotonic() + 60
        held = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        while (left := [metric(port, name) for name in held]) != [0, 0, 0]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        compiled = metric(port, "moejax:jit_compiles_total") - compiles
        preemptions = metric(port, "vllm:num_preemptions_total")
        hits = metric(port, "vllm:prefix_cache_hits_total")
        queries = metric(port, "vllm:prefix_cache_queries_total")
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
    settled = samples[len(samples) // 3 :]
    third = max(1, len(settled) // 4)
    early = statistics.median(s["rss_mib"] for s in settled[:third])
    late = statistics.median(s["rss_mib"] for s in settled[-third:])
    record(
        "soak",
        {
            **stamp(),
            "streams": args.streams,
            "minutes": args.minutes,
            "arguments": args.serve,
            "finished": counts.finished,
            "left_by_clients": counts.left,
            "errors": len(counts.errors),
            "tokens_per_s": counts.tokens / (60 * args.minutes),
            "first_token_s": quantiles(counts.first_token),
            "between_chunks_s": quantiles(counts.between_tokens),
            "rss_mib_early": early,
            "rss_mib_late": late,
            "rss_mib_max": max(s["rss_mib"] for s in samples),
            "rss_mib_by_minute": [round(s["rss_mib"], 1) for s in samples[11::12]],
            "fds_last": samples[-1]["fds"],
            "threads_last": samples[-1]["threads"],
            "held_at_the_end": left,
            "compiles_while_serving": compiled,
            "preemptions": preemptions,
            "prefix_hit_share": hits / queries if queries else 0.0,
            "exit_status": status,
        },
    )
    for error in counts.errors[:5]:
        print(error, file=sys.stderr)
    is_good = not counts.errors and left == [0, 0, 0] and compiled == 0 and status == 0
    return 0 if is_good and late < GROWTH * early else 1


def quantiles(times: list[float]) -> dict[str, float]:
    found = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
    return {"p50": found[49], "p90": found[89], "p99": found[98]}


if __name__ == "__main__":
    run_script(main)
