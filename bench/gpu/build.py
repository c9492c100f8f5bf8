"""Builds fastsync's module and the benchmark's probe with a compiler and nothing else.

A machine with a GPU is often one without a network, CMake or pybind11. The core is plain C++ and needs none of them;
pybind11's headers come with torch. So every source is compiled by one command, as CMake would, and the package is put
together in build/gpu: its Python files as links, so that PYTHONPATH=build/gpu is enough.

    python -m bench.gpu.build                   prints that folder, or one line that says what is missing
    python -m bench.gpu.build libfastsync_core.a     the probe alone, over a core that CMake has built
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("FASTSYNC_GPU_BUILD", ROOT / "build" / "gpu"))
PROBE = FOLDER / "libfastsync_probe.so"
LAYERS = ("common", "device", "bucket", "comm", "control", "sync")
FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread")


class Missing(RuntimeError):
    """What this machine lacks, in one line."""


def compiler() -> str:
    """A C++20 compiler; Missing with the reason if there is none."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        raise Missing("no C++ compiler (g++ 11 or later; CXX names another)")
    check = "#include <span>\n#include <concepts>\nstd::span<int> s;\n"
    run = subprocess.run([found, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], input=check, text=True,
                         capture_output=True, check=False)  # fmt: skip
    if run.returncode != 0:
        raise Missing(f"{found} does not compile C++20 (g++ 11 or later does): {run.stderr.strip().splitlines()[:1]}")
    return found


def binding_includes() -> list[Path]:
    """Python's and pybind11's headers; Missing if either is not here."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise Missing(f"no Python.h in {python} (the package python3-dev has it)")
    places: list[Path] = []
    try:
        import pybind11

        places.append(Path(pybind11.get_include()))
    except ImportError:
        pass
    import torch

    places.append(Path(torch.__file__).parent / "include")
    for place in places:
        if (place / "pybind11" / "pybind11.h").is_file():
            return [python, place]
    raise Missing("no pybind11 headers (the package pybind11 has them; so does torch's include folder, usually)")


def _is_current(made: Path, dependencies: Path) -> bool:
    if not (made.is_file() and dependencies.is_file()):
        return False
    files = re.sub(r"^[^:]*:|\\\n", " ", dependencies.read_text(encoding="utf-8")).split()
    try:
        return all(Path(f).stat().st_mtime <= made.stat().st_mtime for f in files)
    except FileNotFoundError:
        return False


def _run(command: list[str]) -> None:
    run = subprocess.run(command, text=True, capture_output=True, check=False, cwd=ROOT)
    if run.returncode != 0:
        raise Missing(f"{' '.join(command[-2:])} failed: {run.stderr.strip()[-2000:]}")


def build(jobs: int, core: Path | None = None) -> Path:
    """Brings FOLDER up to date and returns it. `core`: a library to link the probe with; nothing else is built then."""
    cxx = compiler()
    version = re.search(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    flags = [*FLAGS, "-I", "csrc", "-I", "third_party", f'-DFASTSYNC_VERSION="{version[1] if version else "0"}"']
    binding = [] if core else [f for place in binding_includes() for f in ("-isystem", str(place))]

    def compile_one(source: Path) -> Path:
        made = FOLDER / "objects" / f"{'_'.join(source.with_suffix('').parts)}.o"
        if not _is_current(made, made.with_suffix(".d")):
            extra = binding if source.parts[1] == "binding" else []
            # Under another name until it is whole: an interrupted build must not look finished.
            draft = made.with_suffix(".draft")
            _run([cxx, *flags, *extra, "-MMD", "-MF", str(made.with_suffix(".d")), "-o", str(draft), "-c", str(source)])
            draft.replace(made)
        return made

    def sources(folder: str) -> list[Path]:
        return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.cc"))

    (FOLDER / "objects").mkdir(parents=True, exist_ok=True)
    shared = [] if core else [source for layer in LAYERS for source in sources(f"csrc/{layer}")]
    own = [] if core else sources("csrc/binding")
    probe = Path("bench/gpu/probe.cc")
    # The longest first: the binding and the protocol take most of the time.
    order = sorted([*shared, *own, probe], key=lambda s: -(ROOT / s).stat().st_size)
    with ThreadPoolExecutor(jobs) as pool:
        objects = dict(zip(order, pool.map(compile_one, order)))

    def link(made: Path, parts: list[Path], *more: Path) -> None:
        inputs = [*(objects[p] for p in parts), *more]
        if made.is_file() and all(i.stat().st_mtime <= made.stat().st_mtime for i in inputs):
            return
        draft = made.with_suffix(".draft")
        _run([cxx, "-shared", "-pthread", "-Wl,--as-needed", *map(str, inputs), "-ldl", "-o", str(draft)])
        draft.replace(made)

    link(PROBE, [*shared, probe], *([core] if core else []))
    if core is None:
        package = FOLDER / "fastsync"
        package.mkdir(exist_ok=True)
        for file in package.iterdir():
            if file.is_symlink():
                file.unlink()
        for file in (ROOT / "python" / "fastsync").iterdir():
            if file.is_file():
                (package / file.name).symlink_to(os.path.relpath(file, package))
        link(package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}", [*shared, *own])
    return FOLDER


def main() -> int:
    try:
        core = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
        print(build(int(os.environ.get("JOBS", os.cpu_count() or 1)), core))
    except Missing as missing:
        print(f"not built: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
