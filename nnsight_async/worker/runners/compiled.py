"""A model that vLLM has compiled, run as it was written where blocks look into it.

vLLM compiles the inner model with torch.compile, without guards, and calls what came of it in the module's ``__call__``
unless ``do_not_compile`` is set there. Setting that switches between the two from one step to the next. A model that is
to be compiled has its norms, activations and rotary embeddings in plain PyTorch, for the compiler to fuse; run as
written they are given the kernels that vLLM takes without a compiler. Seams on vLLM 0.32: ``CustomOp._forward_method``,
``vllm.ir``, ``TorchCompileWithNoGuardsWrapper.do_not_compile``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import vllm.ir
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform


class CompiledCode:
    """The compiled parts of a model, if it has any."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[Any] = [
            module
            for module in model.modules()
            if isinstance(module, TorchCompileWithNoGuardsWrapper) and not getattr(module, "do_not_compile", True)
        ]
        if self._parts:
            _give_kernels(model)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def use(self, compiled: bool) -> None:
        """Run the compiled code from here on, or the model as it was written."""
        for part in self._parts:
            part.do_not_compile = not compiled


def _give_kernels(model: nn.Module) -> None:
    """Have what is run as written use vLLM's own kernels; nothing that is compiled or captured is affected."""
    if not current_platform.is_cuda():
        return
    for module in model.modules():
        if not isinstance(module, CustomOp) or type(module).forward_cuda is CustomOp.forward_cuda:
            continue
        if module._forward_method == module.forward_native:  # else it is a kernel already, or compiled by itself
            module._forward_method = module.forward_cuda
    uncompiled: Any = SimpleNamespace(compilation_config=SimpleNamespace(backend="", mode=CompilationMode.NONE))
    current_platform.get_default_ir_op_priority(uncompiled).set_default()
    vllm.ir.set_default_torch_wrap(False)
