"""What scripts share: what every line of results says of its run, and how a script ends."""

import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax

from moejax.environment import prepare_environment
from moejax.errors import MoejaxError

# Before any device is asked for: without a GPU, jax's CUDA wheels would complain.
prepare_environment(os.environ)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))

RESULTS = pathlib.Path(__file__).parent / "results"


def stamp(commit: str | None = None) -> dict[str, str]:
    """Date, commit, device and version of jax."""
    device = jax.devices()[0]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or _commit(),
        "device": "CPU" if device.platform == "cpu" else device.device_kind,
        "jax": jax.__version__,
    }


def record(name: str, row: dict[str, Any]) -> None:
    """Prints a line and appends it to results/<name>.jsonl."""
    line = json.dumps(row)
    print(line)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def run_script(main: Callable[[], int | None]) -> None:
    """Runs a script to its end, or to one line that says what is wrong."""
    try:
        sys.exit(main())
    except (MoejaxError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {error}")


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
