"""The architectures that this package runs, by their name in a file. Layer 4."""

from __future__ import annotations

from pyggml_dflash.arch.base import Architecture, MtpBlock
from pyggml_dflash.arch.dense import LLAMA, QWEN3
from pyggml_dflash.arch.mtp import Qwen35MtpBlock, read_side_block
from pyggml_dflash.arch.qwen4exp import Qwen4ExpArchitecture
from pyggml_dflash.arch.qwen4exp.config import Qwen4ExpConfig
from pyggml_dflash.arch.qwen4exp.mtp import StreamMtpBlock
from pyggml_dflash.arch.qwen4exp.mtp_file import read_side_streams
from pyggml_dflash.arch.qwen35 import Qwen35Architecture
from pyggml_dflash.errors import UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.options import MtpConvention

ARCHITECTURES: dict[str, Architecture] = {
    name: architecture
    for architecture in (Qwen35Architecture(), Qwen4ExpArchitecture(), QWEN3, LLAMA)
    for name in architecture.names
}


def mtp_block_of(config: ModelConfig, convention: MtpConvention = "all-streams") -> MtpBlock:
    """The MTP block of a model that has one; `convention` matters to qwen4exp."""
    assert config.n_mtp
    if isinstance(config, Qwen4ExpConfig):
        return StreamMtpBlock(config, convention)
    return Qwen35MtpBlock(config)


def with_side_block(file: TensorFile, config: ModelConfig, n_tokens: int) -> ModelConfig:
    """A target's configuration with the MTP block of a file of its own; see `mtp.read_side_block`."""
    if isinstance(config, Qwen4ExpConfig):
        return read_side_streams(file, config, n_tokens)
    return read_side_block(file, config, n_tokens)


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """The file's architecture name and what handles it; an unknown one raises with those known."""
    name = file.get_str("general.architecture")
    found = ARCHITECTURES.get(name)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{file.path}: architecture {name!r} is not supported; supported: {known}"
        )
    return name, found
