"""Named tensors: schemas, words, readers, safetensors files and Hugging Face checkpoints."""

from stitch.tensors.checkpoint import Checkpoint, open_checkpoint
from stitch.tensors.host import HostWeights
from stitch.tensors.reader import WORD_DTYPES, Progress, WeightReader, Words, read_all, word_dtype
from stitch.tensors.writer import write_checkpoint, write_safetensors

__all__ = [
    "WORD_DTYPES",
    "Checkpoint",
    "HostWeights",
    "Progress",
    "WeightReader",
    "Words",
    "open_checkpoint",
    "read_all",
    "word_dtype",
    "write_checkpoint",
    "write_safetensors",
]
