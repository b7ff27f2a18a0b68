"""A line in the log, every so often, of what the engine does."""

import dataclasses
import logging

_EVERY_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Throughput:
    """Counts tokens, and logs their rate every ten seconds in which there are any."""

    since: float
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def count(self, prompt_tokens: int, generation_tokens: int) -> None:
        """Adds the tokens of a step."""
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += generation_tokens

    def report(self, now: float, *, running: int, waiting: int, kv_usage: float) -> None:
        """Logs a line if it is time; `now` is of the clock of `since`, in seconds."""
        seconds = now - self.since
        if seconds < _EVERY_SECONDS:
            return
        if self.prompt_tokens or self.generation_tokens:
            logger.info(
                "%.1f prompt and %.1f new tokens/s; running %d, waiting %d; KV cache %.1f %% used",
                self.prompt_tokens / seconds,
                self.generation_tokens / seconds,
                running,
                waiting,
                100 * kv_usage,
            )
        self.since, self.prompt_tokens, self.generation_tokens = now, 0, 0
