"""vLLM's worker for a CPU, with which a seed keeps its promise (see `seeds`). Only the engine's processes import it."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from services.worker.vllm.seeds import rewind


class RewindingWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker with a model runner that rewinds generators."""

    def init_device(self) -> None:
        """Make the model runner; vLLM's executor calls it."""
        super().init_device()
        if not self.use_v2_model_runner:
            rewind(self.model_runner)
