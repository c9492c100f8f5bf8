"""A folder of csrc/ is a layer: its includes point downward only."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).parents[3] / "csrc"
BOTTOM_UP = ("common", "device", "bucket", "comm", "control", "sync", "binding")
LEVELS = {layer: level for level, layer in enumerate(BOTTOM_UP)}
VENDOR = {path.name for path in (CSRC.parent / "third_party").glob("*.h")}  # declarations: below every layer


def test_every_folder_is_a_known_layer() -> None:
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} == set(LEVELS)


def test_includes_point_downward() -> None:
    upward = []
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in {".h", ".cc", ".inc"}:
            continue
        layer = path.relative_to(CSRC).parts[0]
        for included in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            if included in VENDOR:
                continue
            target = included.split("/")[0]
            if target != layer and LEVELS[target] >= LEVELS[layer]:
                upward.append(f"{path.relative_to(CSRC)} includes {included}")
    assert upward == []
