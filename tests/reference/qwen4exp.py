"""The maths of qwen4exp in double precision, from its definition, a whole text at once.

Streams lie side by side: a residual is [n_tokens, stream, n_embd]. What the family shares with others is in
`forward`, the n-gram embedding in `ngram`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.reference.forward import Array, Reference, Result, rms, sigmoid, silu
from tests.reference.ngram import hashed, ple


class StreamReference(Reference):
    """One model file, ready to compute."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.n_stream = int(self.key("hyper_connection.count"))
        self.ngram_layers = [int(i) for i in self.key("ple.layers", [])]
        self.group_gap: Array = np.empty(0)

    def forward(self, tokens: list[int]) -> Result:
        """All tokens from the start of a sequence."""
        x, gap = self.trunk(tokens)
        return Result(self.read_out("output_hc_", x), gap, self.group_gap)

    def trunk(self, tokens: list[int]) -> tuple[Array, Array]:
        """The residual behind the last layer, and by how much the last chosen expert beat the next."""
        x = np.repeat(self.weights["token_embd.weight"][tokens][:, None], self.n_stream, axis=1)
        gap, self.group_gap = np.full((2, len(tokens)), np.inf)
        for i in range(self.n_layer):
            if i in self.ngram_layers:
                x = x + self.ngrams(f"blk.{i}.", tokens, x)
            x, gaps = self.layer(i, x)
            gap = np.minimum(gap, gaps)
        return x, gap

    def layer(self, i: int, x: Array) -> tuple[Array, Array]:
        """The residual behind layer `i`, and the experts' gap."""
        block = f"blk.{i}."
        h, worth = self.mixed(f"{block}hc_attn_", x)
        recurrent = i < self.n_layer and self.is_recurrent(i)
        y = self.delta_net(block, h) if recurrent else self.sparse(block, i, h)
        x = x + worth[:, :, None] * y[:, None]
        h, worth = self.mixed(f"{block}hc_ffn_", x)
        y, gap = self.experts(block, h)
        return x + worth[:, :, None] * y[:, None], gap

    def read_out(self, mixer: str, x: Array) -> Array:
        """Logits of a residual."""
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return np.asarray(self.mixed(mixer, x)[0] @ head.T)

    def drafts(self, tokens: list[int], *, together: bool, first: int) -> Array:
        """Logits of the MTP block's pairs of tokens from `first` on with the residual in front of each.

        The residual is normalised over all streams together, or over each on its own.
        """
        x, _ = self.trunk(tokens)
        before = np.concatenate([np.zeros_like(x[:1]), x])[first : len(tokens)]
        block, n = f"blk.{self.n_layer}.nextn.", len(before)
        gamma = self.weights[f"{block}hnorm.weight"].reshape(self.n_stream, -1)
        if together:
            h = rms(before.reshape(n, -1), gamma.reshape(-1), self.eps).reshape(before.shape)
        else:
            h = rms(before, gamma, self.eps)
        e = rms(
            self.weights["token_embd.weight"][tokens[first:]], self.weights[f"{block}enorm.weight"], self.eps
        )
        e = np.repeat(e[:, None], self.n_stream, axis=1)
        x = self.linear(f"{block}eh_proj", np.concatenate([e, h], axis=2))
        return self.read_out(f"{block}hc_head_", self.layer(self.n_layer, x)[0])

    def output_gate(self, z: Array) -> Array:
        """A plain gate, where others have silu."""
        return sigmoid(z)

    def mixed(self, name: str, x: Array) -> tuple[Array, Array]:
        """What a part reads [n_tokens, n_embd], and per stream the weight of what it returns."""
        n, n_stream, n_embd = x.shape
        normed = rms(x, self.weights[f"{name}norm.weight"].reshape(n_stream, n_embd), self.eps)
        flat = normed.reshape(n, -1)
        gate = sigmoid(self.linear(f"{name}up", silu(self.linear(f"{name}down", flat) / n_stream)))
        worth = np.zeros((n, n_stream))
        if f"{name}inject.weight" in self.weights:
            worth = 2 * sigmoid(self.linear(f"{name}inject", flat) / n_stream)
        return (normed * gate.reshape(x.shape)).mean(axis=1), worth

    def ngrams(self, block: str, tokens: list[int], x: Array) -> Array:
        """What the n-gram embedding adds."""
        rows = hashed(
            tokens,
            n_gram=int(self.key("ple.ngram_size")),
            eos=int(self.key("ple.eos_token_id")),
            multipliers=[int(m) for m in self.key("ple.layer_multipliers")],
            sizes=[int(n) for n in self.key("ple.head_vocab_sizes")],
            offsets=[int(n) for n in self.key("ple.head_offsets")],
        )
        table = self.weights["per_layer_token_embd.weight"]
        named = {name.removeprefix(block): w for name, w in self.weights.items() if name.startswith(block)}
        return ple(named, table[rows].reshape(len(tokens), -1), x, int(self.key("ple.ngram_size")), self.eps)

    def sparse(self, block: str, layer: int, x: Array) -> Array:
        """Attention over the groups of tokens that score best, and the tokens behind the last whole group."""
        ratios = np.atleast_1d(self.key("attention.compress_ratios", 0))
        ratio = int(ratios[layer] if len(ratios) > 1 else ratios[0])
        if ratio == 0:
            return self.attention(block, x)
        scores = self.scores(block, x, ratio)
        n, n_chosen = len(x), int(self.key("attention.indexer.top_k")) // ratio
        hidden = np.triu(np.ones((n, n), bool), 1)
        for t in range(n):
            n_groups = (t + 1) // ratio
            ranked = np.sort(scores[t, :n_groups])[::-1]
            if n_groups > n_chosen:
                self.group_gap[t] = min(self.group_gap[t], ranked[n_chosen - 1] - ranked[n_chosen])
            order = np.argsort(-scores[t, :n_groups], kind="stable")  # of equals, the lowest
            for group in order[n_chosen:]:
                hidden[t, group * ratio : (group + 1) * ratio] = True
        return self.attention_without(block, x, hidden)

    def scores(self, block: str, x: Array, ratio: int) -> Array:
        """Of every token for every whole group, ahead of it too: [n_tokens, n_groups]."""
        w, d, n = self.weights, int(self.key("attention.indexer.key_length")), len(x)
        q = self.linear(f"{block}indexer.q_proj", x).reshape(n, -1, d)
        q = self.rotary.turn(rms(q, w[f"{block}indexer.q_norm.weight"], self.eps), halves=True)
        raw = self.linear(f"{block}indexer.k_proj", x)[: n // ratio * ratio]
        means = raw.reshape(-1, ratio, d).mean(axis=1)
        keys = rms(means, w[f"{block}indexer.k_norm.weight"], self.eps)
        spread: Array = np.repeat(keys, ratio, axis=0)[:, None]  # a key turns by its group's first position
        keys = self.rotary.turn(spread, halves=True)[::ratio, 0]
        return np.asarray(np.maximum(np.einsum("thd,gd->thg", q, keys), 0).sum(axis=1) / np.sqrt(d))


def reference(path: Path) -> Reference:
    """The reference for a model file of any architecture."""
    found = Reference(path)
    return StreamReference(path) if found.architecture == "qwen4exp" else found
