"""The project's chores. `nox -s NAME [-- arguments for the tool]`; `nox -l` lists them.

All sessions share one virtual environment, .nox/dev, because torch takes most of the time and space
of making one. Each session installs the extras that it needs into it and reuses what is there.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from functools import partial
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "facade", "tests"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).parent
ENVIRONMENT = ROOT / ".nox" / "dev"
BIN = ENVIRONMENT / ("Scripts" if sys.platform == "win32" else "bin")


def install(session: nox.Session, extras: str) -> None:
    """Have aiosync, editable, with ``extras`` in the shared environment."""
    python = BIN / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT), external=True)
    inputs = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    digest = hashlib.sha256(inputs).hexdigest()
    stamps = {extra: ENVIRONMENT / f"installed-{extra}" for extra in extras.split(",")}
    missing = [e for e, stamp in stamps.items() if not stamp.exists() or stamp.read_text() != digest]
    if not missing:
        return
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    session.run(*pip, "-c", "constraints.txt", "-e", f".[{','.join(missing)}]", external=True)
    for extra in missing:
        stamps[extra].write_text(digest)


def python(session: nox.Session, *args: str) -> None:
    """Run the shared environment's Python; after Ctrl-C it gets the time to end cleanly."""
    session.run(str(BIN / "python"), *args, external=True, interrupt_timeout=20.0)


@nox.session
def environment(session: nox.Session) -> None:
    """What the sessions of .ci/run need, in one go: sessions that run side by side must not install."""
    install(session, "cli,docs,lint,rl,test,types")


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: learn CartPole with two worker processes."""
    install(session, "cli,rl")
    python(session, "-m", "aiosync.cli", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests, without the soak, in four processes, since most tests wait for others: `-- -n 0` for one.

    tests/kit/schedule.py says which tests run in the same process, and in which order. A process that dies,
    or has a test that takes too long, ends the run: pytest-xdist 3.8 may wait for ever if it starts another
    one in its place (its issues 1323 and 1378).
    """
    install(session, "test")
    # Where Python may not write bytecode, each of the many processes would compile the sources again.
    python(session, "-m", "compileall", "-q", "aiosync", "benchmarks", "examples", "tests", "tools")
    options = ["-n", "4", "--dist", "loadgroup", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    python(session, "-m", "pytest", *options, *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """The tests that take minutes."""
    install(session, "test")
    python(session, "-m", "pytest", "-m", "soak", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff."""
    install(session, "lint")
    python(session, "-m", "ruff", "check", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, the tests included: tests/typed has programs with mistakes that it must find."""
    install(session, "types")
    python(session, "-m", "mypy", *session.posargs)


@nox.session
def facade(session: nox.Session) -> None:
    """The generated blocking twins are what the generator makes today."""
    install(session, "test")
    python(session, "tools/gen_sync.py", *(session.posargs or ["--check"]))


@nox.session
def parity(session: nox.Session) -> None:
    """The table of torchrl's names in docs/migration.md has a row for each; `-- write` writes it."""
    install(session, "rl,test")
    python(session, "tools/parity.py", *(["--check"] if session.posargs != ["write"] else []))


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, in site/; a warning is an error, and so is a public member without an entry."""
    install(session, "docs")
    python(session, "-m", "mkdocs", "build", "--strict")
    python(session, "tools/check_reference.py", "site")


@nox.session
def package(session: nox.Session) -> None:
    """Build an sdist and a wheel, check them, and run the wheel in an empty environment."""
    install(session, "package")
    out = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(out, ignore_errors=True)
    python(session, "-m", "build", "--outdir", str(out))
    built = sorted(map(str, out.iterdir()))
    python(session, "-m", "twine", "check", "--strict", *built)
    empty = out.parent / "empty"
    python(session, "-m", "venv", "--clear", str(empty))
    (wheel,) = (path for path in built if path.endswith(".whl"))
    run = partial(session.run, str(empty / "bin" / "python"), "-m", external=True)
    with session.chdir(out.parent):  # where no checkout is on the path
        run("pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), wheel)
        run("aiosync", "--version")
        run("aiosync", "doctor")


@nox.session
def dashboard(session: nox.Session) -> None:
    """Ask a real Prometheus, `prometheus` in the PATH, what the dashboard and the alerts ask for."""
    install(session, "test")
    python(session, "-m", "tools.check_dashboard", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """All benchmarks, and docs/benchmarks.md of them: two hours. `-- CASE [options]` for one."""
    install(session, "bench")
    python(session, "-m", "aiosync.cli", "bench", *(session.posargs or ["page"]))
