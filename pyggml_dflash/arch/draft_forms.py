"""Every form a draft comes in, opened as a `dflash` GGUF file or as one with an MTP block. Layer 4.

Which forms exist is decided here and nowhere else; what is in them is the business of one module each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pyggml_dflash.arch.dflash_folder import open_draft_folder
from pyggml_dflash.arch.dflash_older import OLDER_ARCHITECTURES, open_older_draft
from pyggml_dflash.arch.qwen4exp import Qwen4ExpArchitecture
from pyggml_dflash.arch.qwen4exp.mtp_file import with_names_of_today
from pyggml_dflash.arch.qwen35 import Qwen35Architecture
from pyggml_dflash.errors import ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.tensor_file import TensorFile

DraftKind = Literal["dflash", "mtp"]


def open_draft(path: Path) -> TensorFile:
    """A draft's file, or published folder; ModelFileError, or a kind of it, if it cannot be used."""
    if os.path.isdir(path):  # which never raises, whatever the path is
        return open_draft_folder(path)
    if path.suffix == ".safetensors":
        raise ModelFileError(
            f"{path} is part of a published draft; name the folder that holds its config.json"
        )
    file = GgufFile.open(path)
    name = file.get_str("general.architecture")
    if name in Qwen4ExpArchitecture().names:
        return with_names_of_today(file)
    return open_older_draft(file) if name in OLDER_ARCHITECTURES else file


def draft_kind(file: TensorFile) -> DraftKind:
    """What an opened draft is: a model of its own, or the MTP block of its target."""
    name = file.get_str("general.architecture")
    if name == "dflash":
        return "dflash"
    families = (*Qwen35Architecture().names, *Qwen4ExpArchitecture().names)
    n_mtp: int = file.get_int(f"{name}.nextn_predict_layers", 0)
    if name in families and n_mtp:
        return "mtp"
    why = "has no MTP block" if name in families else "is no draft"
    *others, last = families
    known = f"dflash, {', '.join(OLDER_ARCHITECTURES)}, and {', '.join(others)} or {last} with an MTP block"
    raise UnsupportedModelError(f"{file.path}: architecture {name!r} {why}; known drafts: {known}")
