"""Prints the requirements of one of pyproject.toml's extras, for pip's command line."""

import re
import sys
from pathlib import Path

text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
# Python 3.10 has no TOML reader, and an extra is a list of quoted strings.
found = re.search(rf"^{sys.argv[1]} = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
if found is None:
    raise SystemExit(f"pyproject.toml has no extra '{sys.argv[1]}'")
print(*re.findall(r'"([^"]+)"', found[1]))
