"""How many programs this process has compiled, and where compiled ones are kept."""

import logging
import pathlib
import threading
from typing import Any

import jax
import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_count = 0
_is_listening = False

logger = logging.getLogger(__name__)


def num_compiles() -> int:
    """Programs that were compiled, or read from the cache, since the first call."""
    global _is_listening
    with _lock:
        if not _is_listening:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _is_listening = True
        return _count


def _on_event(event: str, duration_secs: float, **_: Any) -> None:
    global _count
    if event == _EVENT:
        with _lock:
            _count += 1


def keep_programs(folder: pathlib.Path) -> None:
    """Keeps compiled programs in a folder for the next start, unless jax has one already.

    Small ones too: many programs of a second each are a slow start.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
