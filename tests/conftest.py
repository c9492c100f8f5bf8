"""Fixtures that every Python test shares."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import markers
from support.ranks import Pool


def pytest_configure(config: pytest.Config) -> None:
    for name, description in markers.DESCRIPTIONS.items():
        config.addinivalue_line("markers", f"{name}: {description}")


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
