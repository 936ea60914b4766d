"""Our worker extension, and in the same process what vLLM itself has for changing weights.

Runs inside vLLM's workers. The other ways are timed here, without pause and remote calls, which our
own pause includes; they get their input ready for use.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from stitch.engines.vllm.worker import StitchWorkerExtension


class BenchmarkWorkerExtension(StitchWorkerExtension):
    def benchmark_patch(self, path: str) -> dict[str, int]:
        """Take a patch from a file of arrays `NAME|index`, `NAME|bits`, `NAME|shape`."""
        worker: Any = self
        from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

        patches = []
        with np.load(path) as arrays:
            for name in [key.removesuffix("|index") for key in arrays if key.endswith("|index")]:
                values = torch.from_numpy(arrays[f"{name}|bits"].view(np.int16))
                patches.append(
                    CheckpointWeightPatch(
                        name=name,
                        shape=tuple(arrays[f"{name}|shape"].tolist()),
                        dtype=torch.bfloat16,
                        values=values.view(torch.bfloat16),
                        indices=torch.from_numpy(arrays[f"{name}|index"]),
                    )
                )
        worker._benchmark_patches = patches
        return {"num_changed": sum(patch.values.numel() for patch in patches)}

    def benchmark_nan_staged(self, chunk_bytes: int, unique: bool) -> dict[str, float]:
        """Apply the patch by vLLM's NaN-staged loader."""
        worker: Any = self
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import checkpoint_weight_patch as loader

        with set_current_vllm_config(worker.vllm_config):
            begin = time.perf_counter()
            loader.load_checkpoint_weight_patches(
                worker.model_runner.get_model(),
                worker._benchmark_patches,
                max_chunk_bytes=chunk_bytes,
                validate_unique_indices=unique,
            )
            return {"ms": (time.perf_counter() - begin) * 1e3}

    def benchmark_reload(self, directory: str) -> dict[str, float]:
        """vLLM's own `reload_weights` of a whole checkpoint."""
        worker: Any = self
        begin = time.perf_counter()
        worker.reload_weights(weights_path=directory)
        return {"ms": (time.perf_counter() - begin) * 1e3}

    def benchmark_setting(self) -> dict[str, Any]:
        """What this worker runs on."""
        return {"torch": str(torch.__version__), "threads": torch.get_num_threads()}

    def benchmark_last_commit(self) -> dict[str, float]:
        """How the latest commit was written."""
        worker: Any = self
        staged = worker._stitch_rank._last.staged
        return {"dense_bytes": staged.dense_bytes, "num_local": staged.num_local}
