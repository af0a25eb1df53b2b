"""Which buffer type can hold a weight so that the device can multiply with it. Layer 1.

ggml answers such questions about whole operations only, so a throwaway operation over a tensor
without data is asked about.
"""

from __future__ import annotations

from typing import Final, Literal

from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.arena import Context
from pyggml_dflash.ggml.cut import cut_of
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, c_string, ffi, lib
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.padding import NO_PADDING, Paddings
from pyggml_dflash.ggml.pins import Pins
from pyggml_dflash.ggml.tensor import Tensor

# What the CUDA kernels of ggml 0.25.3 abort on although they claim support (gated_delta_net.cu, ssm-conv.cu).
GPU_DELTA_NET_SIZES: Final = frozenset({16, 32, 64, 128})
GPU_CONV_TAPS: Final = frozenset({3, 4, 5, 9, 15})

# 'rows' are gathered where the file is mapped, those of a 'table' on the device itself.
WeightUse = Literal["matmul", "experts", "rows", "table", "vector"]


def _supports(
    backend: Backend, buffer_type: CData, type: ElementType, shape: tuple[int, ...], use: WeightUse
) -> bool:
    context = Context(8)
    buffer = lib.ggml_backend_buft_alloc_buffer(buffer_type, 0)
    try:
        c, ne = context.ptr, ffi.new("int64_t[]", list(shape))
        weight = lib.ggml_new_tensor(c, int(type), len(shape), ne)
        weight.buffer = buffer
        if use in ("rows", "table"):
            op = lib.ggml_get_rows(c, weight, lib.ggml_new_tensor_1d(c, lib.GGML_TYPE_I32, 512))
        elif use == "experts":
            x = lib.ggml_new_tensor_3d(c, lib.GGML_TYPE_F32, shape[0], 1, 512)
            op = lib.ggml_mul_mat_id(c, weight, x, lib.ggml_new_tensor_2d(c, lib.GGML_TYPE_I32, 1, 512))
        else:
            op = lib.ggml_mul_mat(c, weight, lib.ggml_new_tensor_2d(c, lib.GGML_TYPE_F32, shape[0], 512))
        return bool(lib.ggml_backend_dev_supports_op(backend.device, op))
    finally:
        if buffer != ffi.NULL:
            lib.ggml_backend_buffer_free(buffer)
        context.close()


def repacked_buffer_type(
    backend: Backend, type: ElementType, shape: tuple[int, ...], use: WeightUse
) -> CData | None:
    """The device's best own layout for a weight, or None when it has none for it."""
    if use in ("rows", "table", "vector"):
        return None
    for buffer_type in backend.extra_buffer_types():
        if _supports(backend, buffer_type, type, shape, use):
            return buffer_type
    return None


def can_compute(backend: Backend, type: ElementType, shape: tuple[int, ...], use: WeightUse) -> bool:
    """True if the device can use a weight of this type that lies in its default memory."""
    if use == "vector":
        return type == ElementType.F32
    return _supports(backend, backend.buffer_type, type, shape, use)


def buffer_type_name(buffer_type: CData) -> str:
    """ggml's name of a buffer type."""
    return c_string(lib.ggml_backend_buft_name(buffer_type))


def can_run(backend: Backend, op: Tensor) -> bool:
    """True if the device can run the operation that makes `op`, without ending the process on it."""
    if not lib.ggml_backend_dev_supports_op(backend.device, op.ptr):
        return False
    if backend.is_host:
        return True
    first, second = op.ptr.src[0], op.ptr.src[1]
    if op.ptr.op == lib.GGML_OP_GATED_DELTA_NET:
        return first.ne[0] in GPU_DELTA_NET_SIZES
    if op.ptr.op == lib.GGML_OP_SSM_CONV:
        return second.ne[0] in GPU_CONV_TAPS
    return True


def builder_for(
    backend: Backend, max_nodes: int, paddings: Paddings = NO_PADDING, *, stream_rows: int = 0
) -> GraphBuilder:
    """An empty graph that runs on a backend and its peers; `paddings` as of `GraphBuilder`, `stream_rows` as
    of `Pins`."""
    if not backend.peers:
        return GraphBuilder(max_nodes, lambda op: can_run(backend, op), paddings)
    pins = Pins(
        backend.all,
        half_links=backend.half_links,
        near_links=backend.near_links,
        stream_rows=stream_rows,
    )
    return GraphBuilder(max_nodes, lambda op: can_run(pins.backend, op), paddings, pins)


def check_supported(backend: Backend, builder: GraphBuilder) -> None:
    """Raise `BackendError` naming the first operation of a graph that its device cannot run."""
    cut = cut_of(builder)
    for i in range(builder.n_nodes):
        node = Tensor(lib.ggml_graph_node(builder.graph, i))
        at = backend if cut is None else cut.backend_of(node)
        if not can_run(at, node):
            what = f"{c_string(lib.ggml_op_name(node.ptr.op))} of {node!r}"
            raise BackendError(f"{at.name} cannot run {what}; run the model on the CPU with --device CPU")
