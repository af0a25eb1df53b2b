"""The gated delta net: a recurrent layer whose state has a fixed size. Layer 4."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_dflash.arch.base import Commit, Record, State, StateTensor, StateUpdate, Step
from pyggml_dflash.arch.blocks import apart, norm, read_slots, write_slots
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import DeltaNetConfig, ModelConfig
from pyggml_dflash.model.weights import BlockWeights, LoadedWeights, TensorSpec, matrix, vector


def unit_rows(g: GraphBuilder, x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the fastest dimension, with eps inside the root."""
    n = x.shape[0]
    return g.scale(g.rms_norm(x, eps / n), n**-0.5)


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What the recurrence of a delta net is fed with: mixed [conv_dim, M], decay and beta [value head, M]."""

    mixed: Tensor
    decay: Tensor
    beta: Tensor


def delta_rows(g: GraphBuilder, w: BlockWeights, x: Tensor) -> DeltaRows:
    """Project x [n_embd, M]; decay is the log of a factor."""
    decay = g.softplus(g.add(w.linear(g, "ssm_alpha", x), w["ssm_dt.bias"]))
    return DeltaRows(
        mixed=w.linear(g, "attn_qkv", x),
        decay=g.mul(decay, w["ssm_a"]),
        beta=g.sigmoid(w.linear(g, "ssm_beta", x)),
    )


@dataclass(frozen=True, slots=True)
class DeltaState:
    """A sequence's recurrent state: conv [taps - 1, conv_dim], memory [d, d, value head]."""

    conv: Tensor
    memory: Tensor


@dataclass(frozen=True, slots=True)
class DeltaScan:
    """A delta net run over rows: the convolution's window [taps - 1 + M, conv_dim] and the op's result."""

    window: Tensor
    out: Tensor
    net: DeltaNetConfig
    n_tokens: int

    def outputs(self, g: GraphBuilder) -> Tensor:
        """[d, value head, M]."""
        net = self.net
        return g.view(
            self.out,
            (net.head_dim, net.n_value_head, self.n_tokens),
            (4 * net.head_dim, 4 * net.value_dim),
            0,
        )

    def memories(self, g: GraphBuilder, n: int) -> Tensor:
        """[d * d * value head, n]: the newest n states, newest first."""
        size = self.net.head_dim * self.net.value_dim
        return g.view(self.out, (size, n), (4 * size,), 4 * self.net.value_dim * self.n_tokens)

    def commit(self, g: GraphBuilder, state: DeltaState) -> None:
        """Overwrite the state with the one after the last row."""
        net = self.net
        shape, offset = (net.n_taps - 1, net.conv_dim), 4 * self.n_tokens
        g.expand(g.copy(g.view(self.window, shape, (self.window.strides[1],), offset), state.conv))
        self.commit_memory(g, state)

    def commit_memory(self, g: GraphBuilder, state: DeltaState) -> None:
        """Overwrite the memory alone."""
        newest = self.memories(g, 1)
        target = g.view(state.memory, (newest.shape[0],), (), 0)  # flat: GPU back ends fuse this copy
        g.expand(g.copy(newest, target))


def delta_scan(
    g: GraphBuilder,
    w: BlockWeights,
    rows: DeltaRows,
    state: DeltaState,
    net: DeltaNetConfig,
    eps: float,
    n_states: int = 1,
) -> DeltaScan:
    """Convolve and run the gated delta rule from `state`, which is only read; keep `n_states` states."""
    n_tokens = rows.mixed.shape[1]
    window = g.concat(state.conv, g.transpose(rows.mixed), 0)  # [taps - 1 + M, conv_dim]
    q, k, v = convolved(g, w, window, net, eps)
    shape = (1, net.n_value_head, n_tokens, 1)
    decay, beta = g.reshape(rows.decay, *shape), g.reshape(rows.beta, *shape)
    out = g.gated_delta_net(q, k, v, decay, beta, state.memory, n_states)
    return DeltaScan(window, out, net, n_tokens)


def convolved(
    g: GraphBuilder, w: BlockWeights, window: Tensor, net: DeltaNetConfig, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [d, head, M, 1] of windows [taps - 1 + M, conv_dim] or [taps, conv_dim, M]."""
    d = net.head_dim
    y = g.silu(g.ssm_conv(window, w["ssm_conv1d.weight"]))  # [conv_dim, M] or [conv_dim, 1, M]
    n_tokens, row = y.shape[1] * y.shape[2], y.strides[1]
    parts = ((net.n_key_head, 0), (net.n_key_head, net.key_dim), (net.n_value_head, 2 * net.key_dim))
    q, k, v = (
        g.view(y, (d, heads, n_tokens, 1), (4 * d, row, row * n_tokens), 4 * start) for heads, start in parts
    )
    return unit_rows(g, q, eps), unit_rows(g, k, eps), v


def gate_delta(
    g: GraphBuilder, w: BlockWeights, outputs: Tensor, net: DeltaNetConfig, gate: Tensor, eps: float
) -> Tensor:
    """Normalise outputs [d, value head, M] per head and multiply them with gate [value_dim, M]."""
    n_tokens = outputs.shape[2]
    rows = norm(g, outputs, w["ssm_norm.weight"], eps)
    gated = g.mul(rows, g.reshape(gate, net.head_dim, net.n_value_head, n_tokens))
    return g.reshape(gated, net.value_dim, n_tokens)


def run_delta(
    g: GraphBuilder, config: ModelConfig, w: BlockWeights, layer: int, x: Tensor, state: State, step: Step
) -> Tensor:
    """One layer's recurrence over x [n_embd, M]: [d, value head, M].

    The state is committed or recorded as the key says.
    """
    net, eps, key = config.delta_net, config.norm_eps, step.key
    assert net is not None
    rows = delta_rows(g, w, x)
    if step.slots is not None:
        return _run_slots(g, config, w, layer, rows, state, step, step.slots)
    if step.stretches:
        return _run_stretches(g, config, w, layer, rows, state, step)
    now = slot_state(g, config, state, layer, key.slot)
    scan = delta_scan(g, w, rows, now, net, eps, key.n_tokens if key.update == "snapshots" else 1)
    if key.update == "commit":
        scan.commit(g, now)
    else:
        assert step.record is not None
        record_rows(g, step.record, layer, rows, scan, key.update)
    return scan.outputs(g)


def _run_stretches(
    g: GraphBuilder,
    config: ModelConfig,
    w: BlockWeights,
    layer: int,
    rows: DeltaRows,
    state: State,
    step: Step,
) -> Tensor:
    """Each slot's rows from its own state, which is committed, or left as it is while they are recorded."""
    net, update = config.delta_net, step.key.update
    assert net is not None
    found: Tensor | None = None
    for stretch in step.stretches:
        now = slot_state(g, config, state, layer, stretch.slot)
        own = DeltaRows(*(stretch.rows(g, x) for x in (rows.mixed, rows.decay, rows.beta)))
        scan = delta_scan(g, w, own, now, net, config.norm_eps, stretch.n if update == "snapshots" else 1)
        if update == "commit":
            scan.commit(g, now)
        else:
            record_rows(g, stretch.record, layer, own, scan, update)
        outputs = scan.outputs(g)
        found = outputs if found is None else g.concat(found, outputs, 2)
    assert found is not None
    return found


def _run_slots(
    g: GraphBuilder,
    config: ModelConfig,
    w: BlockWeights,
    layer: int,
    rows: DeltaRows,
    state: State,
    step: Step,
    slots: Tensor,
) -> Tensor:
    """Every row is the next one of its slot: one convolution for all, memories where they are."""
    net = config.delta_net
    assert net is not None
    taps, width, n_tokens = net.n_taps - 1, net.conv_dim, step.key.n_tokens
    conv = state[f"blk.{layer}.conv"]
    past = g.reshape(read_slots(g, conv, taps * width, slots), taps, width, n_tokens)
    window = g.concat(past, g.reshape(rows.mixed, 1, width, n_tokens), 0)  # [taps, conv_dim, M]
    q, k, v = convolved(g, w, window, net, config.norm_eps)
    newest = g.view(window, (taps, width, n_tokens), window.strides[1:3], 4)
    write_slots(g, conv, g.cont_2d(newest, taps * width, n_tokens), slots)

    def recur(part: Step, i: int) -> Tensor:
        now = slot_state(g, config, state, layer, part.key.slot)
        one = (1, net.n_value_head, 1, 1)
        decay, beta = (g.reshape(g.only(x, 1, i), *one) for x in (rows.decay, rows.beta))
        query, key, value = (g.only(x, 2, i) for x in (q, k, v))
        out = g.gated_delta_net(query, key, value, decay, beta, now.memory)
        scan = DeltaScan(window, out, net, 1)
        scan.commit_memory(g, now)
        return g.reshape(scan.outputs(g), net.value_dim, 1)

    return g.reshape(apart(g, step, recur), net.head_dim, net.n_value_head, n_tokens)


def record_rows(
    g: GraphBuilder, record: Record, layer: int, rows: DeltaRows, scan: DeltaScan, update: StateUpdate
) -> None:
    """Write what `build_commit` needs of a forward that leaves the state as it was."""
    name, n = f"blk.{layer}.", scan.n_tokens
    if update == "snapshots":
        size = scan.window.shape[0] * scan.window.shape[1]
        flat = g.view(record[f"{name}window"], (size,), (), 0)
        g.expand(g.copy(scan.window, flat))
        memories = record[f"{name}memories"]
        size, stride = memories.shape[0], memories.strides[1]
        target = g.view(memories, (size, 1, n), (stride, stride), 0)  # [.., sequence, state]: GPUs fuse it
        g.expand(g.copy(scan.memories(g, n), target))
        return
    for part, x in (("mixed", rows.mixed), ("decay", rows.decay), ("beta", rows.beta)):
        target = record[name + part]
        g.expand(g.copy(x, g.view(target, (x.shape[0], n), (target.strides[1],), 0)))


def recorded_rows(g: GraphBuilder, record: Record, layer: int, n: int) -> DeltaRows:
    """The first `n` rows that `record_rows` wrote for a replay."""

    def first(part: str) -> Tensor:
        x = record[f"blk.{layer}.{part}"]
        return g.view(x, (x.shape[0], n), (x.strides[1],), 0)

    return DeltaRows(first("mixed"), first("decay"), first("beta"))


def delta_record(config: ModelConfig, update: StateUpdate, width: int) -> tuple[StateTensor, ...]:
    """Windows and states after every row, or the rows that the recurrences were fed with."""
    net, found = config.delta_net, []
    assert net is not None
    shapes: dict[str, tuple[int, ...]] = {
        "window": (net.n_taps - 1 + width, net.conv_dim),
        "memories": (net.head_dim * net.value_dim, width),
    }
    if update == "replay":
        gate = (net.n_value_head, width)
        shapes = {"mixed": (net.conv_dim, width), "decay": gate, "beta": gate}
    for i, recurrent in enumerate(config.recurrent):
        if recurrent:
            found += [
                StateTensor(name=f"blk.{i}.{name}", type=ElementType.F32, shape=shape, grows=False)
                for name, shape in shapes.items()
            ]
    return tuple(found)


def commit_delta(
    g: GraphBuilder,
    config: ModelConfig,
    weights: LoadedWeights,
    state: State,
    record: Record,
    commit: Commit,
) -> None:
    """Copy the state after `n_keep` rows, or run the recurrences again over those rows."""
    net = config.delta_net
    assert net is not None
    for i, recurrent in enumerate(config.recurrent):
        if not recurrent:
            continue
        g.follow(state[f"blk.{i}.memory"])
        now = slot_state(g, config, state, i, commit.slot)
        if commit.update == "replay":
            rows = recorded_rows(g, record, i, commit.n_keep)
            delta_scan(g, weights.block(i), rows, now, net, config.norm_eps).commit(g, now)
            continue
        window, memories = record[f"blk.{i}.window"], record[f"blk.{i}.memories"]
        row = 4 * (net.n_taps - 1 + commit.width)
        kept = g.view(window, (net.n_taps - 1, net.conv_dim), (row,), 4 * commit.n_keep)
        g.expand(g.copy(kept, now.conv))
        size = memories.shape[0]
        newest = g.view(memories, (size,), (), 4 * size * (commit.width - commit.n_keep))
        g.expand(g.copy(newest, now.memory))


def delta_specs(prefix: str, config: ModelConfig) -> list[TensorSpec]:
    """The tensors of one delta net."""
    net, n_embd = config.delta_net, config.n_embd
    assert net is not None
    return [
        *matrix(f"{prefix}attn_qkv.weight", n_embd, net.conv_dim),
        *matrix(f"{prefix}attn_gate.weight", n_embd, net.value_dim),
        TensorSpec(f"{prefix}ssm_conv1d.weight", (net.n_taps, net.conv_dim), "vector"),
        vector(f"{prefix}ssm_dt.bias", net.n_value_head),
        vector(f"{prefix}ssm_a", net.n_value_head),
        *matrix(f"{prefix}ssm_alpha.weight", n_embd, net.n_value_head),
        *matrix(f"{prefix}ssm_beta.weight", n_embd, net.n_value_head),
        vector(f"{prefix}ssm_norm.weight", net.head_dim),
        *matrix(f"{prefix}ssm_out.weight", net.value_dim, n_embd),
    ]


def delta_state(config: ModelConfig) -> list[StateTensor]:
    """Convolution window and memory of every delta net, in F32."""
    net, found = config.delta_net, []
    assert net is not None
    window, memory = (net.n_taps - 1, net.conv_dim), (net.head_dim, net.head_dim, net.n_value_head)
    for i, recurrent in enumerate(config.recurrent):
        if recurrent:
            found += [
                StateTensor(name=f"blk.{i}.conv", type=ElementType.F32, shape=window, grows=False),
                StateTensor(name=f"blk.{i}.memory", type=ElementType.F32, shape=memory, grows=False),
            ]
    return found


def slot_state(g: GraphBuilder, config: ModelConfig, state: State, layer: int, slot: int) -> DeltaState:
    """The recurrent state of one layer and slot."""
    net = config.delta_net
    assert net is not None
    conv, memory = (net.n_taps - 1, net.conv_dim), (net.head_dim, net.head_dim, net.n_value_head)
    return DeltaState(
        _slot_view(g, state[f"blk.{layer}.conv"], conv, slot),
        _slot_view(g, state[f"blk.{layer}.memory"], memory, slot),
    )


def _slot_view(g: GraphBuilder, x: Tensor, shape: tuple[int, ...], slot: int) -> Tensor:
    """One slot's part, of `shape`, of a recurrent F32 tensor whose slots lie one behind the other."""
    strides = [4]
    for n in shape:
        strides.append(strides[-1] * n)
    return g.view(x, shape, tuple(strides[1:-1]), slot * strides[-1])
