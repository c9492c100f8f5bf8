"""The wheel: what is in it, what it links to, and where its version comes from."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

import fastsync

ROOT = Path(__file__).parents[3]
BUILD_TIMEOUT_S = 600

# The first test compiles the whole core.
pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + 60)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # The build tools are those of this environment, so that nothing is downloaded. Warm build folders are not used: a
    # wheel must come out of the sources alone.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", f"-Cbuild-dir={out / 'build'}", "-o", out, ROOT],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def contents(wheel: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel) as archive:
        yield archive


def needed_libraries(archive: zipfile.ZipFile) -> dict[str, set[str]]:
    needed = {}
    for name in archive.namelist():
        if re.search(r"\.so(\.|$)", name):
            with archive.open(name) as file:
                dynamic = ELFFile(file).get_section_by_name(".dynamic")
                needed[name] = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    return needed


def test_auditwheel_accepts_it_and_would_bundle_nothing(wheel: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert 'is consistent with the following platform tag: "manylinux_' in text, text
    assert "external shared libraries are required" not in text, text


def test_module_links_to_the_compilers_own_libraries_only(contents: zipfile.ZipFile) -> None:
    (libraries,) = needed_libraries(contents).values()
    # The loader itself is named where thread-local variables are used.
    libraries = {name for name in libraries if not name.startswith("ld-linux")}
    assert "libc.so.6" in libraries
    assert libraries <= {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"}


def test_module_exports_nothing_but_its_entry_point(contents: zipfile.ZipFile) -> None:
    (name,) = needed_libraries(contents)
    with contents.open(name) as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        exported = {
            symbol.name
            for symbol in symbols.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        }
    assert {symbol for symbol in exported if "fastsync" in symbol} == set()
    assert "PyInit__core" in exported


def test_holds_the_package_and_nothing_of_the_tests(contents: zipfile.ZipFile) -> None:
    names = [name for name in contents.namelist() if ".dist-info/" not in name]
    strangers = [
        name for name in names if not re.fullmatch(r"fastsync/([\w/]+\.pyi?|py\.typed|_core[\w.-]*\.so)", name)
    ]
    assert strangers == []
    assert {"fastsync/__init__.py", "fastsync/_core.pyi", "fastsync/py.typed"} <= set(names)
    sources = {path.relative_to(ROOT / "python").as_posix() for path in (ROOT / "python").rglob("*.py*")}
    sources = {name for name in sources if not name.endswith(".pyc")}
    assert sources <= set(names)


def test_carries_its_license(contents: zipfile.ZipFile) -> None:
    assert any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in contents.namelist())


def test_version_has_one_place(wheel: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    assert fastsync.__version__ == version
    assert importlib.metadata.version("fastsync-rl") == version
    assert wheel.name.split("-")[1] == version
    # Nowhere else is it written down.
    sources = [*ROOT.glob("python/**/*.py*"), *ROOT.glob("csrc/**/*.[ch]*"), ROOT / "CMakeLists.txt"]
    texts = {path: path.read_text(encoding="utf-8") for path in sources if path.suffix != ".pyc"}
    assert [path for path, text in texts.items() if f'"{version}"' in text] == []


# Never installed by `make`: NCCL for another CUDA, and vLLM, of which the tests install the build for CPUs.
_NOT_OURS = {"nvidia-nccl-cu12", "vllm"}


def test_every_extra_is_installable_under_the_constraints() -> None:
    """Each requirement of an extra has its version pinned, so that `make` installs one known set."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    files = [ROOT / "constraints.txt", *(ROOT / "tests" / "integrations").glob("requirements-*.txt")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    pinned = {plain(line.split("==")[0]) for line in lines if "==" in line}
    requirements = importlib.metadata.requires("fastsync-rl") or []
    wanted = {plain(found[0]) for text in requirements if (found := re.match(r"[\w.-]+", text))}
    assert "torch" in wanted
    assert wanted - pinned - _NOT_OURS == set()
