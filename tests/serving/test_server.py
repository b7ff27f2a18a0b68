"""The server process: it answers before the model is loaded, and loses nothing when it ends."""

import asyncio
import contextlib
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

# Serves an engine that gives every request a token in each step, and is told by files what to do.
SERVER = textwrap.dedent("""
    import pathlib, sys, time, types
    from moejax_serving import cli, server
    from moejax_serving.outputs import CompletionOutput, RequestOutput

    server._RESPONSE_SECONDS = 0.5
    folder = pathlib.Path(sys.argv.pop(1))

    class Engine:
        tokenizer = None
        max_model_len = 2**30
        model_name = "stub"
        default_sampling = {}
        text = "x"

        def __init__(self):
            self.running = {}

        def add_request(self, request_id, prompt_token_ids, params, prompt=None, *, stream=False):
            self.running[request_id] = [prompt_token_ids, params.max_tokens, 0, stream]

        def abort(self, request_id):
            del self.running[request_id]
            (folder / "aborted").touch()

        def close(self):
            pass

        def has_unfinished(self):
            return bool(self.running)

        def step(self):
            time.sleep(0.01)
            if (folder / "fail").exists():
                raise RuntimeError("no memory")
            while (folder / "hang").exists():
                time.sleep(0.01)
            made = []
            for request_id, request in list(self.running.items()):
                ids, max_tokens, count, stream = request
                request[2] = count = count + 1
                is_end = count == max_tokens
                if is_end:
                    del self.running[request_id]
                if stream or is_end:
                    new = 1 if stream else count
                    reason = "length" if is_end else None
                    choice = CompletionOutput(0, self.text * new, [1] * new, finish_reason=reason)
                    made.append(RequestOutput(request_id, None, ids, None, [choice], is_end))
            (folder / "stepped").touch()
            return made

    def load_engine(model, config, *, metrics):
        while (folder / "loading").exists():
            time.sleep(0.01)
        return Engine()

    load = types.ModuleType("moejax_serving.load")
    load.load_engine = load_engine
    sys.modules["moejax_serving.load"] = load
    sys.exit(cli.main(sys.argv[1:]))
""")


class Server:
    """A server process; `folder` holds the files that tell its engine what to do."""

    def __init__(self, folder: pathlib.Path, process: "subprocess.Popen[str]") -> None:
        self.folder = folder
        self.process = process
        self.log = ""
        found = None
        while found is None:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line, self.log
            self.log += line
            found = re.search(r"listening at http://(.*):(\d+);", line)
        self.address = (found[1], int(found[2]))
        self.url = f"http://{found[1]}:{found[2]}"

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert " is served at " in self.process.stdout.readline()

    def end(self) -> int:
        """Waits for the end of the process; its status."""
        _, errors = self.process.communicate(timeout=20)
        self.log += errors
        return self.process.returncode


@contextlib.contextmanager
def starting(
    folder: pathlib.Path, *argv: str, files: tuple[str, ...] = (), source: str = SERVER
) -> Iterator[Server]:
    for name in files:
        (folder / name).touch()
    (folder / "server.py").write_text(source)
    command = [sys.executable, str(folder / "server.py"), str(folder), "--port", "0", *argv]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Server(folder, process)
        finally:
            process.kill()


@contextlib.contextmanager
def serving(folder: pathlib.Path, *argv: str, source: str = SERVER) -> Iterator[Server]:
    with starting(folder, *argv, source=source) as server:
        server.wait_until_ready()
        yield server


def run(server: Server, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Runs the scenario on a client; one that hangs fails instead."""

    async def limited() -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            asyncio.timeout(30),
            httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client,
        ):
            await scenario(client)

    asyncio.run(limited())


async def stream(client: httpx.AsyncClient, max_tokens: int) -> AsyncIterator[str]:
    """The events of a streamed completion."""
    body = {"prompt": [1], "max_tokens": max_tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


async def begin(client: httpx.AsyncClient, count: int, max_tokens: int) -> list[Any]:
    """Tasks that read streams, each of which has begun; the events are the tasks' results."""
    begun = 0

    async def read() -> list[str]:
        nonlocal begun
        events = []
        async for event in stream(client, max_tokens):
            begun += not events
            events.append(event)
        return events

    tasks = [asyncio.create_task(read()) for _ in range(count)]
    while begun < count:
        await asyncio.sleep(0.01)
    return tasks


async def until(exists: pathlib.Path) -> None:
    while not exists.exists():
        await asyncio.sleep(0.01)


async def until_draining(server: Server) -> None:
    """Waits until a new connection is told that the server ends."""
    host, port = server.address
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=20) as client:
        while (health := await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.02)
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = await client.post("/v1/completions", json={"prompt": [1]})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1


def text_of(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


# Loading


@pytest.mark.shows("server", "answers while the model is being loaded: status 503")
def test_it_answers_while_the_model_is_being_loaded(tmp_path: pathlib.Path) -> None:
    with starting(tmp_path, files=("loading",)) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            refused = await client.post("/v1/completions", json={"prompt": [1]})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "being loaded" in refused.json()["error"]["message"]
            (tmp_path / "loading").unlink()
            server.wait_until_ready()
            assert (await client.get("/health")).status_code == 200
            answer = await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "xxx"

        run(server, scenario)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_loading(
    tmp_path: pathlib.Path, number: signal.Signals, status: int
) -> None:
    with starting(tmp_path, files=("loading",)) as server:
        begun = time.monotonic()
        server.process.send_signal(number)
        assert server.end() == status
        assert time.monotonic() - begun < 5
        assert "Traceback" not in server.log
        assert ("moejax-serve: interrupted" in server.log) == (status == 130)


# The end


@pytest.mark.shows("server", "SIGTERM: no more requests; running ones finish, streams too")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_no_stream(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    with serving(tmp_path) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            # It is sent first, so it is taken when the streams have begun.
            whole = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": [1], "max_tokens": 150})
            )
            tasks = await begin(client, 20, 150)
            server.process.send_signal(number)
            await until_draining(server)
            assert not any(task.done() for task in tasks)
            for events in await asyncio.gather(*tasks):
                assert events[-1] == "[DONE]" and text_of(events) == "x" * 150
            assert (await whole).json()["choices"][0]["text"] == "x" * 150

        run(server, scenario)
        assert server.end() == 0
        assert "unfinished requests: 21" in server.log
        assert "Traceback" not in server.log


def test_a_request_that_arrives_after_the_signal_is_refused(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            (task,) = await begin(client, 1, 100)
            reader, writer = await asyncio.open_connection(*server.address)
            body = b'{"prompt": [1]}'
            writer.write(head(len(body)) + body[:5])
            await writer.drain()
            assert (await client.get("/health")).status_code == 200  # so the head has arrived
            server.process.send_signal(signal.SIGTERM)
            await until_draining(server)
            writer.write(body[5:])
            answer = (await reader.read()).decode()
            assert answer.startswith("HTTP/1.1 503 ")
            assert "retry-after: " in answer.lower()
            assert "shutting down" in answer
            writer.close()
            assert (await task)[-1] == "[DONE]"

        run(server, scenario)
        assert server.end() == 0


def test_an_open_connection_is_told_that_the_server_ends(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            (task,) = await begin(client, 1, 100)
            assert (await client.get("/health")).status_code == 200  # opens another connection
            server.process.send_signal(signal.SIGTERM)
            await until_draining(server)
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = await client.post("/v1/completions", json={"prompt": [1]})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert (await task)[-1] == "[DONE]"

        run(server, scenario)
        assert server.end() == 0


@pytest.mark.parametrize("seconds", ["0", "0.3"])
def test_requests_that_take_longer_than_the_shutdown_timeout_end_with_an_error(
    tmp_path: pathlib.Path, seconds: str
) -> None:
    with serving(tmp_path, "--shutdown-timeout", seconds) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            (task,) = await begin(client, 1, 10**6)
            whole = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": [1], "max_tokens": 10**6})
            )
            await asyncio.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
            answer = await whole
            assert answer.status_code == 503
            assert "the server is shut down" in answer.json()["error"]["message"]
            assert any("the server is shut down" in event for event in await task)

        run(server, scenario)
        assert server.end() == 0
        assert "requests that are ended unfinished: 2" in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_requests_at_once(
    tmp_path: pathlib.Path, second: signal.Signals
) -> None:
    with serving(tmp_path) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            (task,) = await begin(client, 1, 10**6)
            server.process.send_signal(signal.SIGTERM)
            await until_draining(server)
            assert not task.done()
            server.process.send_signal(second)
            async with asyncio.timeout(3):
                assert any("the server is shut down" in event for event in await task)

        run(server, scenario)
        assert server.end() == 0
        assert "Traceback" not in server.log


def test_a_client_that_does_not_read_does_not_hold_the_end(tmp_path: pathlib.Path) -> None:
    source = SERVER.replace('text = "x"', 'text = "x" * 100_000')
    with serving(tmp_path, source=source) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            body = b'{"prompt": [1], "max_tokens": 200, "stream": true}'
            with socket.create_connection(server.address, timeout=20) as silent:
                silent.sendall(head(len(body)) + body)
                await until(tmp_path / "stepped")
                server.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(server.end) == 0

        run(server, scenario)
        assert "whose clients take no answer: 1" in server.log
        assert "Traceback" not in server.log


def test_a_client_that_is_stuck_in_its_body_does_not_hold_the_end(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path) as server:
        with socket.create_connection(server.address, timeout=20) as client:
            client.sendall(head(99) + b"{")
            assert httpx.get(f"{server.url}/health").status_code == 200  # so the head has arrived
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == 0
        assert "Traceback" not in server.log


def test_a_client_that_goes_away_frees_the_engine(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            (task,) = await begin(client, 1, 10**6)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(tmp_path / "aborted")
            server.process.send_signal(signal.SIGTERM)

        run(server, scenario)
        assert server.end() == 0
        assert "unfinished requests" not in server.log


# An engine that is broken


def test_an_engine_that_failed_ends_with_status_1(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path) as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            (tmp_path / "fail").touch()
            answer = await client.post("/v1/completions", json={"prompt": [1]})
            assert answer.status_code == 500
            assert "the engine failed: RuntimeError: no memory" in answer.text
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "dead")
            server.process.send_signal(signal.SIGTERM)

        run(server, scenario)
        assert server.end() == 1


def test_an_engine_that_hangs_ends_with_status_1(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path, "--step-timeout", "0.3") as server:

        async def scenario(client: httpx.AsyncClient) -> None:
            (task,) = await begin(client, 1, 10**6)
            (tmp_path / "hang").touch()
            assert any("a step has taken more than 0.3 s" in event for event in await task)
            assert (await client.get("/health")).status_code == 503
            begun = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.end) == 1
            assert time.monotonic() - begun < 5

        run(server, scenario)
        assert "CRITICAL" in server.log and "in step" in server.log


def head(length: int) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()
