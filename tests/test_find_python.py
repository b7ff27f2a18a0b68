"""scripts/find-python, with fake interpreters on a PATH that holds nothing else."""

import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "find-python"
SHELL = shutil.which("sh") or "/bin/sh"

# What each fake interpreter does with `-c CODE`.
NEW = f'exec "{sys.executable}" "$@"'
OLD = f'exec "{sys.executable}" -c "import sys; sys.version_info = (3, 11, 7); $2"'
WITHOUT_VENV = f'exec "{sys.executable}" -c "import sys; sys.modules[\'ensurepip\'] = None; $2"'
SHIM = 'echo "python3.12: command not found, but exists in these versions: 3.12.1" >&2; exit 127'


class Machine:
    """A machine that has only what a test puts on it."""

    def __init__(self, home: pathlib.Path) -> None:
        self.home = home

    def add(self, path: str, script: str) -> str:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!{SHELL}\n{script}\n")
        file.chmod(0o755)
        return str(file)

    def find(self, path: str = "bin", **env: str) -> subprocess.CompletedProcess[str]:
        folders = ":".join(str(self.home / folder) for folder in path.split(":"))
        return subprocess.run(
            [SHELL, str(SCRIPT)],
            env={"PATH": folders, "HOME": str(self.home), **env},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path / "a home")


def test_the_newest_known_name_on_the_path_wins(machine):
    machine.add("bin/python3", NEW)
    machine.add("bin/python3.12", NEW)
    expected = machine.add("bin/python3.13", NEW)
    found = machine.find()
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{expected}\n", "")


def test_plain_python3_will_do_if_it_is_new_enough(machine):
    expected = machine.add("bin/python3", NEW)
    assert machine.find().stdout == f"{expected}\n"


def test_a_shim_that_refuses_does_not_hide_the_rest_of_the_path(machine):
    machine.add("shims/python3.12", SHIM)
    expected = machine.add("bin/python3.12", NEW)
    assert machine.find("shims:bin").stdout == f"{expected}\n"


def test_pyenv_is_asked_where_its_versions_are(machine):
    machine.add("bin/pyenv", f'echo "{machine.home}/pyenv"')
    machine.add("bin/python3", OLD)
    machine.add("pyenv/versions/3.11.7/bin/python3", OLD)
    expected = machine.add("pyenv/versions/3.12.1/bin/python3", NEW)
    assert machine.find().stdout == f"{expected}\n"


def test_pyenv_off_the_path_is_found_in_the_home(machine):
    expected = machine.add(".pyenv/versions/3.14.0/bin/python3", NEW)
    assert machine.find().stdout == f"{expected}\n"


def test_uv_is_asked_last(machine):
    expected = machine.add("uv/python3.12", NEW)
    machine.add("bin/uv", f'[ "$1 $2" = "python find" ] && echo "{expected}"')
    assert machine.find().stdout == f"{expected}\n"


@pytest.mark.parametrize("unfit", [OLD, WITHOUT_VENV], ids=["old", "without venv"])
def test_an_unfit_python_is_refused_in_one_line_that_says_where_was_looked(machine, unfit):
    machine.add("bin/python3", unfit)
    found = machine.find()
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == (
        "no Python >= 3.12 that can make virtual environments: looked for $PYTHON, python3.13,"
        " python3.12 and python3 on the PATH,"
        f" in {machine.home}/.pyenv/versions, and asked uv\n"
    )


def test_the_variable_wins(machine):
    machine.add("bin/python3.13", NEW)
    expected = machine.add("elsewhere/python", NEW)
    assert machine.find(PYTHON=expected).stdout == f"{expected}\n"


def test_the_variable_may_be_a_name_on_the_path(machine):
    expected = machine.add("bin/my-python", NEW)
    assert machine.find(PYTHON="my-python").stdout == f"{expected}\n"


def test_a_variable_that_will_not_do_is_an_error_and_not_ignored(machine):
    machine.add("bin/python3.13", NEW)
    old = machine.add("bin/python3", OLD)
    found = machine.find(PYTHON=old)
    assert found.returncode == 1
    assert found.stderr == (
        f"PYTHON={old} is not a Python >= 3.12 that can make virtual environments\n"
    )
