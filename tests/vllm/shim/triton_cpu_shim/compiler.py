"""The compiler half: never asked to compile, because kernels are interpreted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpretedCompiler(BaseBackend):
    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError("kernels are interpreted: set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        raise NotImplementedError("kernels are interpreted: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        return

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
