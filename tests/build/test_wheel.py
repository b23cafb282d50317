"""sdist and wheel, built as a user's pip does: isolated, with CUDA, and with no CUDA toolkit on the system.

FP4LINEAR_TEST_WHEEL names a wheel of every architecture (`make wheel`) to inspect in place of building one.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.build import elf

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("90a", "100a", "120a")  # those whose tensor cores have instructions of their own
# The kernels of native_nvfp4 are compiled for a family: its target, a part of their names, and the block-scaled product
# of E2M1 with UE4M3 scales that they are for.
NATIVE = {
    "sm_120f": ("MainloopSm120TmaWarpSpecializedBlockScaled", "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"),
    "sm_100f": ("MainloopSm100TmaUmmaWarpSpecializedBlockScaled", "UTCOMMA"),
}
SYSTEM_TOOLKITS = ("/usr/local/cuda", "/usr/local/bin/nvcc", "/usr/bin/nvcc")
# A kernel and the least number of its instantiations: fp32, fp16 and bf16, each for aligned runs and for any shape;
# both 16-bit types of the GEMVs.
KERNELS = {"dequantize_kernel": 6, "gemv_kernel": 2, "scalar_kernel": 2}
# A package folder that Git ignores would be left out of the sdist without a word.
SDIST_HOLDS = (
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "build_backend/cuda_toolchain.py",
    "build_backend/fp4linear_build.py",
    "cmake/Cuda.cmake",
    "cpp/formats/e2m1.h",
    "cpp/cpu/cpu.h",
    "cuda/backend.h",
    "cuda/dequantize.cu",
    "cuda/native.cmake",
    "cuda/native_nvfp4_sm120.cu",
    "THIRD_PARTY_NOTICES",
    "cuda/stub.cc",
    "cuda/device/e2m1.cuh",
    "src/fp4linear/__init__.py",
    "src/fp4linear/_core/module.cpp",
    "tests/build/elf.py",
    "third_party/CMakeLists.txt",
)

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the source tree"),
]


def pip(*arguments: str, python: str = sys.executable, **environment: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **environment}, cwd="/")


def hide_system_cuda(command: list[str]) -> list[str]:
    """The command in a mount namespace where an empty folder lies over each toolkit; as it is where there is none."""
    places = {os.path.realpath(place) for place in SYSTEM_TOOLKITS if os.path.exists(place)}
    on_path = shutil.which("nvcc")
    if on_path:
        places.add(os.path.realpath(on_path))
    if not places:
        return command
    unshare = elf.tool("unshare")
    if subprocess.run([unshare, "--mount", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this system has CUDA, and no mount namespace may be made to hide it")
    script = 'set -e; empty=$(mktemp -d); while [ "$1" != -- ]; do '
    script += 'if [ -d "$1" ]; then mount --bind "$empty" "$1"; else mount --bind /dev/null "$1"; fi; shift; done; '
    script += 'shift; exec "$@"'
    return [unshare, "--mount", "sh", "-c", script, "sh", *sorted(places, key=len), "--", *command]


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    script = f"import fp4linear_build; fp4linear_build.build_sdist({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, env=environment)
    (archive,) = folder.glob("fp4linear-*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("FP4LINEAR_TEST_WHEEL")
    if given:
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--verbose", "--no-deps"]
    command += ["--wheel-dir", str(folder), str(sdist)]
    switches = {"FP4LINEAR_CUDA": "on", "FP4LINEAR_CUDA_ARCHITECTURES": ";".join(ARCHITECTURES)}
    without = {name: value for name, value in os.environ.items() if name not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH")}
    hidden = hide_system_cuda(command)
    build = subprocess.run(
        hidden,
        check=False,
        cwd="/",
        env={**without, **switches},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert build.returncode == 0, build.stdout
    decision = re.search(r"fp4linear: building CUDA for (\S+) \(.*\) with nvcc [\d.]+ from PyPI", build.stdout)
    assert decision is not None, build.stdout
    assert decision[1] == ";".join(ARCHITECTURES)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("fp4linear/_core.abi3.so", tmp_path_factory.mktemp("module")))


def test_sdist_is_complete_and_minimal(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert set(SDIST_HOLDS) <= names
    unwanted = [name for name in names if re.match(r"(\.|build/|dist/|lab/)|.*(__pycache__|\.so$|\.pyc$)", name)]
    assert unwanted == []


def test_wheel_is_one_file_for_every_python(wheel):
    assert re.fullmatch(r"fp4linear-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(
            archive.read(next(name for name in names if name.endswith(".dist-info/METADATA")))
        )
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fp4linear"}
    assert {"fp4linear/__init__.py", "fp4linear/_core.pyi", "fp4linear/py.typed"} <= set(names)
    for notice in ("LICENSE", "THIRD_PARTY_NOTICES"):
        assert any(name.endswith(f"licenses/{notice}") for name in names)
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    kinds = {name.rsplit(".", 1)[-1] for name in names if name.startswith("fp4linear/")}
    assert not kinds & {"cpp", "h", "cc", "cu", "txt", "pyc"}
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "fp4linear = fp4linear.cli:main" in entry_points


def test_links_no_cuda_library(module):
    assert elf.needed_libraries(module) <= elf.SYSTEM_LIBRARIES
    assert elf.search_path(module) == []
    assert not [name for name in elf.exported_symbols(module) if not name.startswith("_Z") and name != "PyInit__core"]


def test_holds_the_architectures_that_it_was_built_for(module):
    given = os.environ.get("FP4LINEAR_TEST_WHEEL") is not None
    expected = {f"sm_{name}" for name in ARCHITECTURES} | set(NATIVE)
    assert elf.sass_architectures(module) == expected | ({"sm_75", "sm_80", "sm_86", "sm_89"} if given else set())
    assert not given or "sm_100" in elf.ptx_architectures(module)  # for devices that came later


@pytest.mark.parametrize(("kernel", "instantiations"), KERNELS.items())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_holds_machine_code_of_the_kernels(module, architecture, kernel, instantiations):
    found = [name for name in elf.kernels(module, f"sm_{architecture}") if kernel in name]
    assert len(found) >= instantiations


@pytest.mark.parametrize(("family", "name", "instruction"), [(family, *what) for family, what in NATIVE.items()])
def test_native_kernels_multiply_block_scaled(module, family, name, instruction):
    """For plain sm_120 CUTLASS's kernels compile too, into machine code that multiplies nothing."""
    found = elf.kernels(module, family)
    assert len(found) == 2 and all(name in kernel for kernel in found)  # the small tile and the large one
    for kernel in found:
        assert instruction in elf.sass(module, family, kernel)
    for architecture in elf.sass_architectures(module):  # and nothing of it anywhere else
        if architecture != family:
            assert not {kernel for kernel in elf.kernels(module, architecture) if name in kernel}


def test_cutlass_takes_the_shapes_of_native_nvfp4(wheel, tmp_path):
    """Argument structs, strides and tiles, asked of CUTLASS's can_implement() on the host."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    interpreter = str(tmp_path / "venv" / "bin" / "python")
    pip("install", "--quiet", str(wheel), python=interpreter)
    subprocess.run([interpreter, "-c", NATIVE_SHAPES], check=True, cwd=tmp_path)


NATIVE_SHAPES = """
from fp4linear import _core

for sm, tiles in ((120, ((128, 128, 128), (256, 128, 128))), (100, ((128, 128, 256), (256, 128, 256)))):
    for capability in (sm, sm + (1 if sm == 120 else 3)):  # 12.0 and 12.1, 10.0 and 10.3
        for dtype in ("float16", "bfloat16"):
            for m in (1, 9, 127, 128, 129, 256, 257, 4096, 100_000):
                for n in (32, 96, 128, 4096, 28_672, 248_320):
                    for k in (32, 64, 96, 256, 2048, 17_408):
                        found = _core.native_kernels(capability, n, k, m, dtype)
                        assert found["built"] and found["reason"] == "", (capability, m, n, k, found)
                        large = m > (256 if sm == 120 else 128)
                        assert found["tile"] == tiles[large] and found["cluster"] == (2 if sm == 100 and large else 1)
        for n, k in ((32, 48), (64, 16), (36, 64)):  # not 16 bytes a row of codes, or of y
            assert _core.native_kernels(capability, n, k, 16)["reason"], (n, k)
for capability in (75, 80, 90, 110):
    found = _core.native_kernels(capability, 64, 64, 16)
    assert not found["built"] and found["reason"], found
"""


def pythons() -> list[str]:
    """Interpreters of other versions on PATH and in pyenv's folder, one a version; this one in any case."""
    candidates = [sys.executable]
    for minor in range(10, 16):
        on_path = shutil.which(f"python3.{minor}")
        candidates += [on_path] if on_path else []
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        candidates += [str(path) for path in sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))]
    found: dict[str, str] = {}
    question = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        answer = subprocess.run([candidate, "-c", question], capture_output=True, text=True, check=False)
        if answer.returncode == 0:  # a shim of a version that is not installed fails
            found.setdefault(answer.stdout.strip(), candidate)
    return list(found.values())


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parent.parent.name)
def test_imports_and_runs_without_cuda(wheel, python, tmp_path):
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    interpreter = str(tmp_path / "venv" / "bin" / "python")
    pip("install", "--quiet", str(wheel), python=interpreter)
    script = (
        "import numpy, fp4linear\n"
        "b = numpy.full((3, 8), 0x22, numpy.uint8); scales = numpy.full((3, 1), 0x38, numpy.uint8)\n"
        "y = fp4linear.Fp4Linear(b, scales, 1.0).forward(numpy.ones((2, 16), numpy.float32))\n"
        "assert y.tolist() == [[16.0] * 3] * 2, y\n"
        "info = fp4linear._core.cuda_info(); assert info['built'], info\n"
    )
    subprocess.run(
        [interpreter, "-c", script], check=True, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    subprocess.run(
        [str(tmp_path / "venv" / "bin" / "fp4linear"), "--help"], check=True, cwd=tmp_path, capture_output=True
    )
