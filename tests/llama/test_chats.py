"""Chats saved and restored by the real server through a mount."""

import filecmp
from pathlib import Path

import pytest
import smolkinds
from llama import Paths, Server

from .conftest import Mount, Saved, copy_in, restore_three_chats, save_three_chats, understood

pytestmark = pytest.mark.llama


def test_three_chats_survive_restarts(llama: Paths, smollm2: Path, mount: Mount, plain_chats: Saved) -> None:
    """Saved through the mount, all restarted, restored: nothing is computed again, same text."""
    mounted = mount()
    saved = save_three_chats(llama, smollm2, mounted.path)
    assert saved.prompts == plain_chats.prompts
    for ours, plain in zip(saved.paths, plain_chats.paths, strict=True):
        assert filecmp.cmp(ours, plain, shallow=False), f"{ours.name} differs from the plain copy"
    mounted.remount()
    answers = restore_three_chats(llama, smollm2, saved)
    # A prompt's last token is always computed again, for its logits.
    assert [cached for cached, _ in answers] == [len(prompt) - 1 for prompt in saved.prompts]
    assert [text for _, text in answers] == saved.texts
    assert answers == restore_three_chats(llama, smollm2, plain_chats)


def test_three_chats_share_to_the_limit(mount: Mount, plain_chats: Saved) -> None:
    """The ratio is within 1 % of what the position oracle says (about 2.1)."""
    mounted = mount()
    copy_in(plain_chats.paths, mounted)
    assert mounted.stats()["dedup_ratio"] == pytest.approx(understood(plain_chats.paths).ratio, rel=0.01)


@pytest.mark.parametrize("how", ["unlink", "truncate"])
def test_a_longer_chat_stores_only_its_tail(
    llama: Paths, smollm2: Path, mount: Mount, tmp_path: Path, how: str
) -> None:
    """Clients drop the old save before they write the longer one; its blocks must still be there."""
    mounted = mount()
    old, new = tmp_path / "old.bin", tmp_path / "new.bin"
    new_name = "longer.bin" if how == "unlink" else "chat.bin"
    with Server(llama, smollm2, mounted.path, "-fa", "on") as server:
        prompt = smolkinds.chats(server, 1000, (700,)).prompts[0]
        server.completion(prompt[:1500])
        server.save("chat.bin")
        old.write_bytes((mounted.path / "chat.bin").read_bytes())
        before = mounted.stats()["new_block_bytes"]
        if how == "unlink":
            (mounted.path / "chat.bin").unlink()
        server.completion(prompt)
        server.save(new_name)
        new.write_bytes((mounted.path / new_name).read_bytes())
    stored = mounted.stats()["new_block_bytes"] - before
    assert [path.name for path in mounted.path.iterdir()] == [new_name]
    tail = understood([old, new]).stored - understood([old]).stored
    # A tail's first group may be cut anew, in each of 60 sections: 8 KiB for all of them together.
    assert stored <= 1.01 * tail + 8192
