"""Adapters where their framework is not installed, or is another than they know."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

import fastsync
from fastsync.integrations._framework import Framework, FrameworkError


@pytest.mark.parametrize(
    ("adapter", "package", "tested"), [("verl", "verl", "0.8.0 and 0.9.1"), ("twinkle", "twinkle-kit", "0.5.1")]
)
def test_a_missing_framework_is_named_with_the_range_and_the_extra(
    adapter: str, package: str, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, adapter, None)  # as if it were not installed
    for name in list(sys.modules):
        if name.startswith((f"{adapter}.", f"fastsync.integrations.{adapter}")):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"fastsync.integrations.{adapter}")
    assert isinstance(caught.value, fastsync.Error)
    for text in (package, tested, f"pip install 'fastsync-rl[{adapter}]'"):
        assert text in str(caught.value)


def test_an_unknown_shape_is_refused_by_the_feature_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("some_framework")
    module.Registry = type("Registry", (), {"register": 1})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_framework", module)
    framework = Framework("some-framework", "1.0", "some")
    assert framework.load("some_framework", "Registry.register") is module
    with pytest.raises(FrameworkError, match=r"no some_framework\.Registry\.get.*tested: 1\.0.*fastsync-rl\[some\]"):
        framework.load("some_framework", "Registry.register", "Registry.get")
