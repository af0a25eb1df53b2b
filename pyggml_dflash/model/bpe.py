"""A vocabulary as a `tokenizers` (Rust) BPE: text to ids. Layer 2.

Owns the construction only. SentencePiece's merging is expressed as ranked merges: it always joins the
neighbours whose union has the best score, which is BPE with every split of every piece as a merge, ranked
by the piece's score. Where two overlapping splits of one piece compete, the one with the longer left side
wins, as in Hugging Face's conversion.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.model.vocab import PREFIX, TokenType, Vocab

SPACE_MARK = "\u2581"


def build(vocab: Vocab, *, nfc: bool) -> tuple[RustTokenizer, RustTokenizer]:
    """Two encoders over one model: the first takes the texts of control tokens as these tokens, the
    second as ordinary text. User-defined tokens are taken by both. None adds BOS or EOS."""
    model = _byte_level_model(vocab) if vocab.kind == "bpe" else _sentencepiece_model(vocab)
    parsing, literal = RustTokenizer(model), RustTokenizer(model)
    for encoder in (parsing, literal):
        if vocab.kind == "bpe":
            _cut_into_words(encoder, vocab, nfc=nfc)
        else:
            _mark_spaces(encoder, vocab)
        encoder.add_tokens(_added(vocab, TokenType.USER_DEFINED))
    parsing.add_special_tokens(_added(vocab, TokenType.CONTROL, TokenType.UNKNOWN))
    return parsing, literal


def _added(vocab: Vocab, *types: TokenType) -> list[AddedToken]:
    special = TokenType.USER_DEFINED not in types
    return [AddedToken(vocab.texts[i], normalized=False, special=special) for i in vocab.of_type(*types)]


def _cut_into_words(encoder: RustTokenizer, vocab: Vocab, *, nfc: bool) -> None:
    if nfc and vocab.pre.nfc:
        encoder.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in vocab.pre.expressions]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, spell])


def _mark_spaces(encoder: RustTokenizer, vocab: Vocab) -> None:
    mark = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if vocab.add_space_prefix else []
    encoder.normalizer = normalizers.Sequence([*prefix, mark])


def _byte_level_model(vocab: Vocab) -> models.BPE:
    merges = []
    for i, merge in enumerate(vocab.merges):
        cut = merge.find(" ", 1)  # the left token may begin with a space, as in very old files
        if cut < 0:
            raise DamagedFileError(
                f"{PREFIX}merges[{i}] is {merge[:60]!r}; it must be two tokens and a space"
            )
        merges.append((merge[:cut], merge[cut + 1 :]))
    try:
        return models.BPE(vocab.ids, merges, ignore_merges=vocab.pre.ignore_merges)
    except Exception as error:  # the library raises no class of its own
        raise _bad_merge(vocab, merges, error) from None


def _bad_merge(vocab: Vocab, merges: Sequence[tuple[str, str]], error: Exception) -> DamagedFileError:
    """Which merge the library could not take; it names neither the place nor the reason."""
    for i, (left, right) in enumerate(merges):
        for text in (left, right, left + right):
            if text not in vocab.ids:
                return DamagedFileError(
                    f"{PREFIX}merges[{i}] is {vocab.merges[i][:60]!r}, but {text[:60]!r} is no token"
                )
    return DamagedFileError(f"{PREFIX}merges do not fit {PREFIX}tokens: {error}")


def _sentencepiece_model(vocab: Vocab) -> models.BPE:
    spells_bytes = all(f"<0x{byte:02X}>" in vocab.ids for byte in range(256))
    if not spells_bytes and vocab.unknown_id is None:
        raise UnsupportedModelError(
            f"{PREFIX}tokens has neither the 256 byte tokens <0x00> to <0xFF> nor an unknown token"
        )
    unknown = None if vocab.unknown_id is None else vocab.texts[vocab.unknown_id]
    return models.BPE(
        vocab.ids,
        _merges_of_scores(vocab),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=spells_bytes,
    )


def _merges_of_scores(vocab: Vocab) -> list[tuple[str, str]]:
    pieces = {vocab.texts[i]: vocab.scores[i] for i in vocab.of_type(TokenType.NORMAL, TokenType.UNUSED)}
    ranked = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]
