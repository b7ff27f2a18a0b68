"""The line of the log that says how fast it goes."""

import logging

import pytest

from moejax_serving.throughput import Throughput


def test_a_line_comes_every_ten_seconds_in_which_there_are_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = {"running": 3, "waiting": 1, "kv_usage": 0.25}
    found = Throughput(since=100.0)
    with caplog.at_level(logging.INFO):
        found.count(30, 10)
        found.report(109.0, **queue)
        assert caplog.messages == []
        found.count(10, 30)
        found.report(120.0, **queue)
        line = "2.0 prompt and 2.0 new tokens/s; running 3, waiting 1; KV cache 25.0 % used"
        assert caplog.messages == [line]
        found.report(140.0, **queue)  # nothing has been done
        found.count(0, 10)
        found.report(150.0, **queue)
    assert caplog.messages[1:] == [
        "0.0 prompt and 1.0 new tokens/s; running 3, waiting 1; KV cache 25.0 % used"
    ]
