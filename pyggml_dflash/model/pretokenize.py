"""How text is cut into words before byte-level BPE, per `tokenizer.ggml.pre` of a GGUF. Layer 2.

A GGUF does not carry its pre-tokenizer, only its name. Each name stands for expressions that are applied
one after the other: every match becomes a word of its own, and so does what lies between two matches;
the next expression cuts those words further. Merges never cross words. The expressions are those of the
models' own Hugging Face tokenizers, written for Oniguruma; they are data of these models, so a name that
is not listed is refused, since a near miss yields other tokens without any sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyggml_dflash.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One family of byte-level BPE tokenizers."""

    expressions: tuple[str, ...]
    nfc: bool = False  # the model was trained on text in Unicode NFC
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file says nothing


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


def _words(digits: str, *, letter: str = r"\p{L}") -> str:
    """The expression of the GPT-4 kind, which differs between models in few places."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|\p{{N}}{digits}"
        rf"| ?[^\s{letter}\p{{N}}]+[\r\n]*|{_SPACE}"
    )


def _cased_words(digits: str, contraction: str) -> str:
    """The expression of the o200k kind: a word also ends where lower case turns into upper case."""
    prefix = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{prefix}{_UPPER}*{_LOWER}+{contraction}|{prefix}{_UPPER}+{_LOWER}*{contraction}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
    )


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"

_LLAMA3 = (_words("{1,3}"),)
_QWEN2 = (_words(""),)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)

_FAMILIES: Final[tuple[tuple[str, PreTokenizer], ...]] = (
    ("qwen35", PreTokenizer(expressions=(_words("", letter=r"\p{L}\p{M}"),), nfc=True)),
    ("qwen2", PreTokenizer(expressions=_QWEN2, nfc=True)),
    (
        "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer(expressions=_QWEN2),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(expressions=_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    ("smaug-bpe dbrx chatglm-bpe", PreTokenizer(expressions=_LLAMA3)),
    ("glm4 glm5", PreTokenizer(expressions=_LLAMA3, ignore_merges=True)),
    ("minicpm5", PreTokenizer(expressions=(r"\p{N}{1,3}", _words("+")), ignore_merges=True)),
    (
        "smollm starcoder refact codeshell exaone minerva-7b mellum2",
        PreTokenizer(expressions=_DIGITS_GPT2),
    ),
    ("command-r", PreTokenizer(expressions=_DIGITS_GPT2, nfc=True)),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum jais trillion "
        "granite-docling exaone4",
        PreTokenizer(expressions=(_GPT2,)),
    ),
    ("mpt olmo", PreTokenizer(expressions=(_GPT2,), nfc=True)),
    (
        "default",
        PreTokenizer(expressions=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    ("falcon", PreTokenizer(expressions=(r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "deepseek-llm",
        PreTokenizer(
            expressions=(
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"(?<!\s)\s+$",  # the lookbehind changes no match; without it long gaps cost their square
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(expressions=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(expressions=_DEEPSEEK3)),
    ("tekken", PreTokenizer(expressions=(_cased_words("", ""),), ignore_merges=True, add_bos=True)),
    (
        "gpt-4o llama4 kanana2 minimax-m2",
        PreTokenizer(expressions=(_cased_words("{1,3}", _CONTRACTION + "?"),)),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer(expressions=(_BLOOM,))),
    ("viking", PreTokenizer(expressions=(_BLOOM, r"\p{N}"))),
    ("seed-coder", PreTokenizer(expressions=(_SEED,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer(expressions=(_BAILING,))),
)

PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    name: family for names, family in _FAMILIES for name in names.split()
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that a GGUF calls `name`; UnsupportedModelError if it is not known."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        ) from None
