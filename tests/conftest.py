"""What every test runs under: strict shapes and types, and four CPU devices.

On a machine without an NVIDIA driver jax runs on the CPU. With one, JAX_PLATFORMS is left as it is,
so `pytest -m gpu` finds the GPU. No XLA flags are set here: what compiling without a GPU needs is
given to that compilation alone (see aot.py).
"""

import os
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType

# XLA's collectives on simulated devices wait for each other: two threads are too few for four.
os.environ.setdefault("NPROC", "16")
if shutil.which("nvidia-smi") is None:
    # Otherwise the wheels that compile for a GPU look for its libraries and complain.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Models that differ in their weights only share their programs: compiled once per run of the tests.
_cache = tempfile.TemporaryDirectory(prefix="moejax-tests-")
jax.config.update("jax_compilation_cache_dir", _cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# An example that compiles takes seconds, the next one of that shape none.
hypothesis.settings.register_profile("moejax", deadline=None)
hypothesis.settings.load_profile("moejax")


def pytest_configure() -> None:
    # Workers of pytest-xdist ignore interrupts, and so would the processes that tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shows-only", action="store_true", help="run what the README's table names")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--shows-only"):
        items[:] = [item for item in items if item.get_closest_marker("shows") is not None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, and jax runs on {jax.default_backend()}")


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """$MOEJAX_CACHE of server processes: the second one with the same flags compiles nothing."""
    return tmp_path_factory.mktemp("demo_cache")


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """The folder of checkpoints, data and tokenizers beside the checkout."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    return folder


@pytest.fixture(scope="session")
def numpy_forward(shared_dir: pathlib.Path) -> Iterator[ModuleType]:
    """The independent forward pass in NumPy; scripts beside it import it as numpy_ref."""
    import references  # not before the packages under test are instrumented

    module = references.numpy_forward(shared_dir)
    sys.modules["numpy_ref"] = module
    yield module
    del sys.modules["numpy_ref"]
