"""The operations that our models are built from, over one graph under construction. Layer 1.

Shapes in docstrings are ggml's: fastest dimension first. No method allocates data: a graph's
memory comes from its allocator, inputs and weights bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.arena import Context
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.padding import MOST_PADDED, NO_PADDING, Paddings
from pyggml_dflash.ggml.pins import Pins
from pyggml_dflash.ggml.tensor import Tensor

Supports = Callable[[Tensor], bool]
LINK_ROWS: Final = 65  # fewer rows, as those of decoded tokens, always cross in single precision


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    """Arguments of the rotary embedding in ggml's terms (mode 0: adjacent pairs, 2: halves)."""

    n_dims: int
    mode: int
    freq_base: float
    freq_scale: float = 1.0
    n_ctx_orig: int = 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class GraphBuilder:
    """One graph being built: owns its tensor headers and its list of nodes.

    `max_nodes` bounds both; a builder that runs over raises before ggml would abort. `supports` tells
    whether the device can run an operation; where it cannot, the few operations that have a
    composition of others use it. Products with weights are made of as many rows as `paddings` says. With
    `pins` the graph runs over several backends: `follow` and `at` say where the next operations run, at first
    where inputs are.
    """

    def __init__(
        self,
        max_nodes: int,
        supports: Supports | None = None,
        paddings: Paddings = NO_PADDING,
        pins: Pins | None = None,
    ) -> None:
        self._supports, self._paddings, self.pins = supports, paddings, pins
        self._most_padded = MOST_PADDED if paddings else 0
        self.cut: object | None = None  # how the graph is divided, once it is; see `ggml.cut`
        self.forwards = [0]  # the first node of each forward of the graph
        self.picks: list[Tensor] = []  # I32 [n_used, M] of each layer with experts: which were chosen
        self._stack = ExitStack()
        # A graph lists the tensors that it only reads as well; two per operation is more than any model has.
        self._context = Context(2 * max_nodes, 2 * max_nodes)
        self._stack.callback(self._context.close)
        self._c = self._context.ptr
        self._left = max_nodes
        self.graph: CData = lib.ggml_new_graph_custom(self._c, 2 * max_nodes, False)

    @property
    def n_bytes(self) -> int:
        """Host bytes of headers and node list."""
        return self._context.n_bytes

    @property
    def n_nodes(self) -> int:
        """Nodes added to the graph so far."""
        return int(lib.ggml_graph_n_nodes(self.graph))

    def close(self) -> None:
        """Free headers and node list."""
        self._stack.close()

    def closes_with(self, close: Callable[[], object]) -> None:
        """Call `close` when the builder closes, before its headers are freed."""
        self._stack.callback(close)

    def begin_forward(self) -> None:
        """What is built from now on is another forward, behind the one before; over several backends the two
        run beside each other, each part behind the same part of the forward before."""
        self.forwards.append(self.n_nodes)
        if self.pins is not None:
            self.pins.now = 0

    def follow(self, x: Tensor) -> None:
        """Run what comes next where `x`, which has memory of its own, lies."""
        if self.pins is not None:
            self.pins.follow(x)

    def sent(self, x: Tensor, to: Tensor, n_rows: int) -> Tensor:
        """F32 x as the backend that holds `to` gets it: rounded to half precision on the way, if it crosses,
        links are half and it has the many rows of a prompt; else x itself."""
        pins = self.pins
        if pins is None or not pins.half_links or n_rows < LINK_ROWS or pins.home(to.ptr) == pins.now:
            return x
        half = self.cast(x, ElementType.F16)
        with self.at(to):
            return self.cast(half, ElementType.F32)

    @property
    def place(self) -> int:
        """Where what comes next runs: a backend, by its place among them."""
        return 0 if self.pins is None else self.pins.now

    @property
    def has_tiles(self) -> bool:
        """As `Backend.has_tiles` of where what comes next runs; with one backend the model knows."""
        return self.pins is None or self.pins.backend.has_tiles

    @property
    def near_links(self) -> bool:
        """True if what crosses to another backend costs time by the crossing, hardly by its bytes."""
        return self.pins is not None and self.pins.near_links

    def streams(self, weight: Tensor, n_rows: int) -> bool:
        """True if products of so many rows are made here, with a copy of a weight in host memory."""
        return self.pins is not None and self.pins.streams(weight, n_rows)

    @contextmanager
    def at(self, x: Tensor) -> Iterator[None]:
        """Run what is built inside where `x`, which has memory of its own, lies."""
        if self.pins is None:
            yield
            return
        before = self.pins.now
        self.pins.follow(x)
        try:
            yield
        finally:
            self.pins.now = before

    def _new(self, ptr: CData) -> Tensor:
        self._left -= 1
        if self._left < 16:  # ggml makes up to a few helper tensors per call and aborts when full
            raise BackendError("the graph is larger than its builder was made for")
        if self.pins is not None:
            self.pins.put(ptr)
        return Tensor(ptr)

    def expand(self, x: Tensor) -> Tensor:
        """Append `x` and what it depends on; the order of calls is the order of execution."""
        lib.ggml_build_forward_expand(self.graph, x.ptr)
        return x

    def output(self, x: Tensor) -> Tensor:
        """Keep `x` readable after the graph has run, and append it."""
        lib.ggml_set_output(x.ptr)
        return self.expand(x)

    def named(self, x: Tensor, name: str) -> Tensor:
        """Give `x` a name that tests and dumps can find."""
        lib.ggml_set_name(x.ptr, name.encode()[:63])
        return x

    # arithmetic, element by element; the second operand is broadcast

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""
        return self._new(lib.ggml_add(self._c, a.ptr, b.ptr))

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b."""
        return self._new(lib.ggml_sub(self._c, a.ptr, b.ptr))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b."""
        return self._new(lib.ggml_mul(self._c, a.ptr, b.ptr))

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b."""
        return self._new(lib.ggml_div(self._c, a.ptr, b.ptr))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""
        return self._new(lib.ggml_scale(self._c, x.ptr, factor))

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        """x limited to [low, high], in place."""
        return self._new(lib.ggml_clamp(self._c, x.ptr, low, high))

    def abs(self, x: Tensor) -> Tensor:
        """|x|."""
        return self._new(lib.ggml_abs(self._c, x.ptr))

    def sgn(self, x: Tensor) -> Tensor:
        """-1, 0 or 1: the sign of x."""
        return self._new(lib.ggml_sgn(self._c, x.ptr))

    def sqrt(self, x: Tensor) -> Tensor:
        """Square root."""
        return self._new(lib.ggml_sqrt(self._c, x.ptr))

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)."""
        return self._new(lib.ggml_relu(self._c, x.ptr))

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""
        return self._new(lib.ggml_silu(self._c, x.ptr))

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x))."""
        return self._new(lib.ggml_sigmoid(self._c, x.ptr))

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + exp(x))."""
        return self._new(lib.ggml_softplus(self._c, x.ptr))

    def tanh(self, x: Tensor) -> Tensor:
        """Hyperbolic tangent."""
        return self._new(lib.ggml_tanh(self._c, x.ptr))

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return self._new(lib.ggml_swiglu_split(self._c, gate.ptr, up.ptr))

    # rows and normalisation

    def rms_norm(self, x: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the fastest dimension."""
        return self._new(lib.ggml_rms_norm(self._c, x.ptr, eps))

    def soft_max(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """softmax(x * scale + mask) over the fastest dimension."""
        mask_ptr = ffi.NULL if mask is None else mask.ptr
        return self._new(lib.ggml_soft_max_ext(self._c, x.ptr, mask_ptr, scale, 0.0))

    def sum_rows(self, x: Tensor) -> Tensor:
        """Sum over the fastest dimension, which becomes 1."""
        return self._new(lib.ggml_sum_rows(self._c, x.ptr))

    def top_k(self, x: Tensor, k: int) -> Tensor:
        """I32 [k, rows]: indices of the k largest of each row, best first."""
        return self._new(lib.ggml_argsort_top_k(self._c, x.ptr, k))

    def best_k(self, x: Tensor, k: int) -> Tensor:
        """I32 [k, rows]: indices of the k largest of each row, in no order."""
        out = self._new(lib.ggml_top_k(self._c, x.ptr, k))
        return out if self._supports is None or self._supports(out) else self.top_k(x, k)

    def get_rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """F32 rows of `table` [n, rows] at I32 `ids`."""
        return self._new(lib.ggml_get_rows(self._c, table.ptr, ids.ptr))

    def set_rows(self, table: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Write F32 `rows` into `table` at I64 or I32 `ids`, converting to its type.

        Tables may be stacked: table [n, rows, more], rows [n, k, more], ids [k, more]. Ids of one table
        are distinct.
        """
        return self._new(lib.ggml_set_rows(self._c, table.ptr, rows.ptr, ids.ptr))

    # matrices

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        """w [in, out] times x [in, n]: F32 [out, n]."""
        ne = x.ptr.ne
        n = ne[1]
        n_made = self._paddings.rows(w.weight_kind, n) if n <= self._most_padded and ne[2] == 1 else n
        if n_made == n:
            return self._new(lib.ggml_mul_mat(self._c, w.ptr, x.ptr))
        y = self._new(lib.ggml_mul_mat(self._c, w.ptr, self._repeated(x, n_made).ptr))
        return self.view(y, (y.shape[0], n), y.strides[1:2], 0)

    def _repeated(self, x: Tensor, n: int) -> Tensor:
        """x [in, m] with its first rows again behind it, once or over and over, until there are `n`."""
        n_in, m, _, _ = x.shape
        if n % m == 0:
            return self.repeat(x, n_in, n, 1, 1)
        assert n < 2 * m
        return self.concat(x, self.view(x, (n_in, n - m), x.strides[1:2], 0), 1)

    def mul_mat_id(self, experts: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        """Per row, the products with its chosen experts.

        experts [in, out, n_expert], x [in, n_used or 1, n], ids I32 [n_used, n]: [out, n_used, n].
        """
        return self._new(lib.ggml_mul_mat_id(self._c, experts.ptr, x.ptr, ids.ptr))

    def accumulate_f32(self, x: Tensor) -> Tensor:
        """Ask for single-precision accumulation in the operation that made `x`."""
        lib.ggml_prec_set_acc(x.ptr, lib.GGML_PREC_F32)
        return x

    # shape

    def reshape(self, x: Tensor, *shape: int) -> Tensor:
        """The same elements of a contiguous tensor under another shape of up to four dimensions."""
        ne = (*shape, 1, 1, 1)[:4]
        if len(shape) == 1:
            return self._new(lib.ggml_reshape_1d(self._c, x.ptr, ne[0]))
        if len(shape) == 2:
            return self._new(lib.ggml_reshape_2d(self._c, x.ptr, ne[0], ne[1]))
        if len(shape) == 3:
            return self._new(lib.ggml_reshape_3d(self._c, x.ptr, *ne[:3]))
        return self._new(lib.ggml_reshape_4d(self._c, x.ptr, *ne))

    def view(self, x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
        """A window into `x`: up to four dimensions, byte strides of all but the fastest, byte offset."""
        c, p = self._c, x.ptr
        if len(shape) == 1:
            return self._new(lib.ggml_view_1d(c, p, shape[0], offset))
        if len(shape) == 2:
            return self._new(lib.ggml_view_2d(c, p, *shape, *strides, offset))
        if len(shape) == 3:
            return self._new(lib.ggml_view_3d(c, p, *shape, *strides, offset))
        return self._new(lib.ggml_view_4d(c, p, *shape, *strides, offset))

    def only(self, x: Tensor, dim: int, i: int) -> Tensor:
        """Element `i` along dimension `dim`, which becomes 1; no copy."""
        n_dims = max(dim + 1, *(j + 1 for j, n in enumerate(x.shape) if n > 1 or j == 0))
        shape = tuple(1 if j == dim else n for j, n in enumerate(x.shape[:n_dims]))
        return self.view(x, shape, x.strides[1:n_dims], i * x.strides[dim])

    def some(self, x: Tensor, dim: int, start: int, n: int) -> Tensor:
        """`n` elements from `start` on along `dim`, the last dimension of `x`; no copy."""
        return self.view(x, (*x.shape[:dim], n), x.strides[1 : dim + 1], start * x.strides[dim])

    def cont(self, x: Tensor) -> Tensor:
        """A contiguous copy."""
        return self._new(lib.ggml_cont(self._c, x.ptr))

    def fill(self, like: Tensor, value: float) -> Tensor:
        """A new tensor of the shape and type of `like`, contiguous F32 or F16, with one value everywhere."""
        return self._new(lib.ggml_fill(self._c, like.ptr, value))

    def count(self, n: int) -> Tensor:
        """F32 [n]: 0, 1, 2, ..."""
        return self._new(lib.ggml_arange(self._c, 0.0, float(n), 1.0))

    def cont_2d(self, x: Tensor, n0: int, n1: int) -> Tensor:
        """A contiguous copy under the shape [n0, n1]."""
        return self._new(lib.ggml_cont_2d(self._c, x.ptr, n0, n1))

    def repeat(self, x: Tensor, n0: int, n1: int, n2: int, n3: int) -> Tensor:
        """x repeated along its dimensions until it has this shape."""
        return self._new(lib.ggml_repeat_4d(self._c, x.ptr, n0, n1, n2, n3))

    def pad_rows_before(self, x: Tensor, n: int) -> Tensor:
        """`n` rows of zeros in front of x [width, rows]."""
        return self._new(lib.ggml_pad_ext(self._c, x.ptr, 0, 0, n, 0, 0, 0, 0, 0))

    def pad_rows_behind(self, x: Tensor, n: int) -> Tensor:
        """`n` rows of zeros behind the rows of each matrix of x [width, rows, matrix]."""
        return x if n == 0 else self._new(lib.ggml_pad(self._c, x.ptr, 0, n, 0, 0))

    def permute(self, x: Tensor, a: int, b: int, c: int, d: int) -> Tensor:
        """Dimension 0 becomes dimension `a`, 1 becomes `b`, and so on; no copy."""
        return self._new(lib.ggml_permute(self._c, x.ptr, a, b, c, d))

    def transpose(self, x: Tensor) -> Tensor:
        """Swap the two fastest dimensions; no copy."""
        return self._new(lib.ggml_transpose(self._c, x.ptr))

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """`a`, then `b`, along dimension `dim`."""
        return self._new(lib.ggml_concat(self._c, a.ptr, b.ptr, dim))

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        """Write `source` into `target` (same number of elements), converting to its type."""
        return self._new(lib.ggml_cpy(self._c, source.ptr, target.ptr))

    def put(self, table: Tensor, rows: Tensor, first: int) -> Tensor:
        """`table` F32 [n, m], written over with `rows` [n, k] from row `first` on."""
        row = table.strides[1]
        args = (table.ptr, rows.ptr, row, table.strides[2], table.strides[3], first * row)
        return self._new(lib.ggml_set_inplace(self._c, *args))

    def cast(self, x: Tensor, type: ElementType) -> Tensor:
        """A copy with another element type."""
        return self._new(lib.ggml_cast(self._c, x.ptr, int(type)))

    # attention and recurrence

    def rope(self, x: Tensor, positions: Tensor, factors: Tensor | None, rope: RopeParams) -> Tensor:
        """Rotate the first `rope.n_dims` of each head of x [head_dim, head, token] by I32 positions."""
        factors_ptr = ffi.NULL if factors is None else factors.ptr
        r = rope
        scaling = (r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow)
        args = (x.ptr, positions.ptr, factors_ptr, r.n_dims, r.mode, r.n_ctx_orig, *scaling)
        return self._new(lib.ggml_rope_ext(self._c, *args))

    def flash_attn(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, max_visible: int = 0
    ) -> Tensor:
        """Fused attention: q [d, token, head], k and v [d, n_kv, head_kv], F16 mask [n_kv, token].

        Result [d, head, token]. Each group of head / head_kv query heads shares a key head. With a fourth
        dimension, of q, k, v and mask [n_kv, token, 1, n], n of them run apart. `max_visible`: the mask
        leaves at most so many keys to a token, which lets some devices skip the others; 0 if unknown.
        """
        out = lib.ggml_flash_attn_ext(self._c, q.ptr, k.ptr, v.ptr, mask.ptr, scale, 0.0, 0.0)
        lib.ggml_prec_set_acc(out, lib.GGML_PREC_F32)
        if max_visible:
            lib.ggml_flash_attn_ext_set_n_kv_max(out, max_visible)
        return self._new(out)

    def lightning_indexer(self, q: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
        """F32 [n, token]: scale * (sum over heads of max(q . key, 0)) + mask.

        q F32 [d, head, token], contiguous; keys [d, n]; mask F16 [n, token].
        """
        d, n_head, n_token, _ = q.shape
        n, row = keys.shape[1], keys.strides[1]
        weights = self.fill(self.view(q, (n_head, n_token), (4 * n_head,), 0), scale)
        k = self.view(keys, (d, 1, n), (row, row), 0)
        out = self._new(lib.ggml_lightning_indexer(self._c, q.ptr, k.ptr, weights.ptr, mask.ptr))
        if self._supports is None or self._supports(out):
            return out
        if n_token <= 8:  # few rows: one product reads the keys once
            products = self.relu(
                self.accumulate_f32(self.mul_mat(keys, self.reshape(q, d, n_head * n_token)))
            )
        total: Tensor | None = None
        for i in range(n_head):
            if n_token <= 8:
                term = self.view(products, (n, n_token), (4 * n * n_head,), 4 * n * i)
            else:  # many rows: head after head, so that the products of one lie in memory at a time
                head = self.view(q, (d, n_token), (q.strides[2],), q.strides[1] * i)
                term = self.relu(self.accumulate_f32(self.mul_mat(keys, head)))
            total = term if total is None else self.add(total, term)
        assert total is not None
        return self.add(self.scale(total, scale), self.cast(mask, ElementType.F32))

    def ssm_conv(self, x: Tensor, taps: Tensor) -> Tensor:
        """Causal convolution per channel: x [taps - 1 + token, channel, seq], taps [taps, channel].

        Result [channel, token, seq].
        """
        out = self._new(lib.ggml_ssm_conv(self._c, x.ptr, taps.ptr))
        if self._supports is None or self._supports(out):
            return out
        n_taps, n_channel, n_seq = taps.shape[0], taps.shape[1], x.shape[2]
        n_token = x.shape[0] - n_taps + 1
        total: Tensor | None = None
        for i in range(n_taps):
            rows = self.view(x, (n_token, n_channel, n_seq), x.strides[1:3], 4 * i)
            term = self.mul(rows, self.view(taps, (1, n_channel), (taps.strides[1],), 4 * i))
            total = term if total is None else self.add(total, term)
        assert total is not None
        return self.cont(self.transpose(total))

    def mean_of_gated_streams(self, x: Tensor, gate: Tensor) -> Tensor:
        """mean over streams of x * sigmoid(gate), both F32 [n, stream, token]: [n, token]."""
        n, n_stream, n_token, _ = x.shape
        out = self._new(lib.ggml_dsv4_hc_pre_gated(self._c, x.ptr, gate.ptr, 1.0 / n_stream))
        if self._supports is None or self._supports(out):
            return out
        gated = self.mul(x, self.sigmoid(gate))
        stream, token = gated.strides[1], gated.strides[2]
        total = self.view(gated, (n, n_token), (token,), 0)
        for i in range(1, n_stream):
            total = self.add(total, self.view(gated, (n, n_token), (token,), i * stream))
        return self.scale(total, 1.0 / n_stream)

    def add_to_streams(self, streams: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """streams + x * weights: F32 streams [n, stream, token], x [n, token], weights [stream, token]."""
        n, n_stream, n_token, _ = streams.shape
        out = self._new(lib.ggml_dsv4_hc_post(self._c, x.ptr, streams.ptr, weights.ptr, ffi.NULL))
        if self._supports is None or self._supports(out):
            return out
        copies = self.repeat(self.reshape(x, n, 1, n_token), n, n_stream, n_token, 1)
        return self.add(streams, self.mul(copies, self.reshape(weights, 1, n_stream, n_token)))

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, n_states: int = 1
    ) -> Tensor:
        """Gated delta rule over a run of tokens.

        q, k [d, head_k, token, seq] with unit rows; v [d, head_v, token, seq]; decay (log) and beta
        [1, head_v, token, seq]; state [d, d, head_v, seq]. Result [d * head_v, token * seq + n_states
        * d * seq]: outputs, then `n_states` states, newest first. Value head n reads key head
        n mod head_k.
        """
        return self._new(
            lib.ggml_gated_delta_net(self._c, q.ptr, k.ptr, v.ptr, decay.ptr, beta.ptr, state.ptr, n_states)
        )
