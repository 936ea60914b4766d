"""The tiny model is an ordinary model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stitch.demo.tiny_model import random_weights, write_tiny_model


def test_any_text_survives_the_tokenizer(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    text = "18 + 46 = 64\n\tünïcode ∑ 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_end_token_is_the_models(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    one, two = (write_tiny_model(tmp_path / name, seed=5) for name in ("a", "b"))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    first, other = random_weights(8, seed=1), random_weights(8, seed=2)
    assert first.words("model.norm.weight").tolist() == other.words("model.norm.weight").tolist()
    name = "model.embed_tokens.weight"
    assert first.words(name).tolist() != other.words(name).tolist()


def test_a_directory_that_is_there_already_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        write_tiny_model(tmp_path)
