"""Saved conversations: what is written is read back, and anything else is refused with its place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from dflash_cli.conversation import Conversation, load_conversation

from pyggml_dflash.errors import UsageError


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation(),
        Conversation(system="Sei nett — ü."),
        Conversation(turns=["hi", "hello", "and now?"]),
        Conversation(system="s", turns=["hi\nthere", ""]),
    ],
)
def test_a_saved_conversation_loads_as_it_was(tmp_path: Path, conversation: Conversation) -> None:
    path = tmp_path / "talk.json"
    conversation.save(path)
    assert load_conversation(path) == conversation
    conversation.save(path)  # over itself


def test_messages_are_those_of_the_engine() -> None:
    conversation = Conversation(system="s", turns=["a", "b", "c"])
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in conversation.messages] == ["s", "a", "b", "c"]
    assert conversation.unanswered


def test_a_file_that_is_no_conversation_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(UsageError, match=r"notes\.txt exists and holds something else"):
        Conversation(turns=["a"]).save(path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        Conversation().save(tmp_path / "no" / "talk.json")


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"messages": []}, "holds dict; it must hold a list"),
        (["hi"], "message 0 must be an object"),
        ([{"role": "user"}], "message 0 must be an object with 'role' and 'content'"),
        ([{**USER, "name": "x"}], "message 0 must be an object"),
        ([{"role": "user", "content": 5}], "message 0 has the content '5'; it must be a string"),
        ([ASSISTANT], "message 0 has the role 'assistant'; 'user' is expected"),
        ([USER, USER], "message 1 has the role 'user'; 'assistant' is expected"),
        ([USER, ASSISTANT, SYSTEM], "message 2 has the role 'system'; 'user' is expected"),
        ([{"role": ["x"], "content": ""}], "message 0 has the role"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError) as refused:
        load_conversation(path)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


@pytest.mark.parametrize(("content", "message"), [(b"{", "is not JSON"), (b"\xff", "is not JSON")])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_conversation(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_conversation(tmp_path / "none.json")


def test_a_conversation_that_cannot_be_encoded_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    Conversation(turns=["a"]).save(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="no character"):
        Conversation(turns=["\ud800"]).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["talk.json"]


def test_a_save_keeps_the_mode_and_the_link(tmp_path: Path) -> None:
    path, link = tmp_path / "talk.json", tmp_path / "link.json"
    Conversation(turns=["a"]).save(path)
    path.chmod(0o600)
    link.symlink_to(path)
    Conversation(turns=["b"]).save(link)
    assert link.is_symlink()
    assert load_conversation(path).turns == ["b"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "fifo", "deep.json"])
def test_what_is_no_file_of_messages_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UsageError):
        load_conversation(tmp_path / name)
    with pytest.raises(UsageError):
        Conversation(turns=["a"]).save(tmp_path / name)
