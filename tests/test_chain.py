"""A checkpoint that is to be served, and those below it."""

import json

import pytest
import saved

from cupyrec.parallel import Communicator
from cupyrec.serving.chain import Chain


def test_what_follows_on_what_is_served(tmp_path):
    paths = saved.save_chain(tmp_path)
    chain = Chain.found(paths[2])
    told = [json.loads((path / "manifest.json").read_text())["crc32"] for path in paths]
    assert chain.crc32s == told
    assert [link.folder for link in chain.after(told[0]).links] == paths[1:]
    assert chain.after(told[2]).links == []
    assert chain.after(12345) is None
    assert Chain.found(paths[1]).after(told[2]) is None


def test_no_more_than_what_follows_is_checked(tmp_path):
    paths = saved.save_chain(tmp_path)
    saved.spoil(paths[0], "embedding.groups.4.00000-of-00001.ids")
    chain = Chain.found(paths[2])
    assert "parameter/top.biases.0" in chain.after(chain.crc32s[0]).checked(Communicator())
    with pytest.raises(ValueError, match="it is damaged"):
        chain.checked(Communicator())


def test_a_cut_file_of_dense_arrays_is_told(tmp_path):
    chain = Chain.found(saved.save_chain(tmp_path)[0])
    file = chain.path / "dense.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    for look in (chain.dense, lambda: chain.checked(Communicator())):
        with pytest.raises(ValueError, match=f"'{file}' must have .* bytes, got 50"):
            look()
