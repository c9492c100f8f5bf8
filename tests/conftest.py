"""Fixtures that every Python test shares."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import markers
from support.devices import doubles_missing_reason
from support.ranks import Pool


def pytest_configure(config: pytest.Config) -> None:
    for name, description in markers.DESCRIPTIONS.items():
        config.addinivalue_line("markers", f"{name}: {description}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a real device run only where they are asked for."""
    if "gpu" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("gpu") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = doubles_missing_reason()
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "/device/" in r.nodeid]
    if reason is not None and skipped:
        terminalreporter.write_line(f"*** {len(skipped)} device tests NOT run: {reason} ***", red=True, bold=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.session.stash.setdefault(_failed, []).append(item.nodeid)
    return report


_failed: pytest.StashKey[list[str]] = pytest.StashKey()


@pytest.fixture(scope="session")
def _session_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def pool(_session_pool: Pool, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """The rank processes. After a failed test they are all replaced."""
    failed_before = len(request.session.stash.get(_failed, []))
    yield _session_pool
    _session_pool.drop_extra()
    if len(request.session.stash.get(_failed, [])) > failed_before:
        _session_pool.reset()
