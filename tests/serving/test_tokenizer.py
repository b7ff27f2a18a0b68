"""The tokenizer: equal to transformers' on real files, whole characters when streamed."""

import collections
import json
import pathlib
import random
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import CapacityError, CheckpointError, RequestError
from moejax_serving.tokenizer import Tokenizer

FOLDERS = [
    "tokenizers/deepseek_v3",
    "tokenizers/mixtral-8x7b-v1",
    "tokenizers/qwen3",
    "tokenizers/smollm2",
    "models/demo",
]
TEXTS = [
    "",
    " ",
    "Hello world",
    " leading, trailing ",
    "a\n\n\tb  c",
    "h\u00e9llo \u65e5\u672c \U0001f469\u200d\U0001f469\u200d\U0001f467",
    "12345 3.14 don't we'll I'M",
    "<s>[INST] x [/INST]</s> <|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "\u200b\ufeff e\u0301 \ufffd y",
    "<tool_call>{}</tool_call>",
]


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, shared_dir: pathlib.Path) -> pathlib.Path:
    path: pathlib.Path = shared_dir / request.param
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def reference(folder: pathlib.Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_encodes_and_decodes_as_transformers_does(tokenizer: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        for add in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add)
            assert ids == reference.encode(text, add_special_tokens=add), (text, add)
            for skip in (True, False):
                expected = reference.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_knows_the_special_tokens_that_transformers_knows(
    tokenizer: Tokenizer, reference: Any
) -> None:
    assert tokenizer.vocab_size == len(reference)
    for name in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{name}_token") == getattr(reference, f"{name}_token")
        assert getattr(tokenizer, f"{name}_token_id") == getattr(reference, f"{name}_token_id")
    assert reference.special_tokens_map.items() <= tokenizer.special_tokens.items()


def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" ".join(TEXTS), add_special_tokens=False)
    stream = tokenizer.detokenizer(skip_special_tokens=False)
    text = "".join(stream.push(token_id) for token_id in ids) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_any_tokens_can_be_streamed(tokenizer: Tokenizer) -> None:
    """Also bytes that are no UTF-8; a byte that changes how earlier ones read cannot take back."""
    numbers = random.Random(0)
    some = tokenizer.encode("\u65e5\U0001f469 n\u00e9e", add_special_tokens=False)
    for _ in range(200):
        every = range(tokenizer.vocab_size)
        ids = numbers.choices(numbers.choice([every, some]), k=20)
        stream = tokenizer.detokenizer()
        text = "".join(map(stream.push, ids)) + stream.finish()
        assert text.replace("\ufffd", "") or not tokenizer.decode(ids).replace("\ufffd", "")


def test_text_after_a_prompt_continues_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world \u65e5\u672c \U0001f469 n\u00e9e", add_special_tokens=False)
    for cut in range(1, len(ids)):
        end = cut  # the tokens of an unfinished character belong to what follows
        while tokenizer.decode(ids[:end]).endswith("\ufffd"):
            end -= 1
        stream = tokenizer.detokenizer(prompt_token_ids=ids[:cut])
        after = "".join(map(stream.push, ids[cut:])) + stream.finish()
        assert tokenizer.decode(ids[:end]) + after == tokenizer.decode(ids), cut


def test_the_text_of_a_token_keeps_its_space(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).lstrip() == text
    assert tokenizer.token_text(ids[-1]).endswith("x")


def test_streams_whole_characters_only(byte_tokenizer: Tokenizer) -> None:
    stream = byte_tokenizer.detokenizer()
    ids = byte_tokenizer.encode("a\u65e5b")
    assert [stream.push(token_id) for token_id in ids] == ["a", "", "", "\u65e5", "b"]
    assert stream.finish() == ""


def test_what_was_held_back_comes_at_the_end(byte_tokenizer: Tokenizer) -> None:
    stream = byte_tokenizer.detokenizer()
    ids = byte_tokenizer.encode("\u65e5")
    assert stream.push(ids[0]) + stream.push(ids[1]) == ""
    assert stream.finish() == byte_tokenizer.decode(ids[:2])
    assert stream.finish() == ""


@given(st.lists(st.integers(0, 256), max_size=40), st.booleans())
def test_streamed_bytes_are_the_decoded_bytes(
    byte_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    stream = byte_tokenizer.detokenizer(skip_special_tokens=skip)
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join(parts) + stream.finish() == byte_tokenizer.decode(ids, skip)


def test_special_tokens_can_be_streamed_or_left_out(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.detokenizer(skip_special_tokens=True).push(256) == ""
    assert byte_tokenizer.detokenizer(skip_special_tokens=False).push(256) == "<|end|>"


def test_a_token_that_the_vocabulary_lacks_is_no_text(byte_tokenizer: Tokenizer) -> None:
    stream = byte_tokenizer.detokenizer()
    ids = [*byte_tokenizer.encode("a"), 9999, *byte_tokenizer.encode("b")]
    assert "".join(map(stream.push, ids)) + stream.finish() == "ab"


def test_half_a_surrogate_pair_is_a_wrong_request(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half a surrogate pair"):
        byte_tokenizer.encode("a\ud800")


def test_a_chat_becomes_text_or_tokens(byte_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = byte_tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|user|>Hi<|end|><|assistant|>"
    ids = byte_tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert ids == byte_tokenizer.encode("<|user|>Hi") + [256]


def _write(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}))
    backend.enable_truncation(1)
    backend.enable_padding(length=5, pad_id=2)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_padding_and_truncation_of_the_file_are_off(tmp_path: pathlib.Path) -> None:
    assert Tokenizer.from_folder(_write(tmp_path)).encode("a b a") == [0, 1, 0]


def test_special_tokens_may_be_strings_or_objects(tmp_path: pathlib.Path) -> None:
    eos = {"__type": "AddedToken", "content": "<e>", "lstrip": False, "normalized": True}
    tokenizer = Tokenizer.from_folder(_write(tmp_path, bos_token="b", eos_token=eos))
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("b", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<e>", 3)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (None, None)
    assert tokenizer.encode("a<e>") == [0, 3]
    assert tokenizer.decode([0, 3]) == "a"


def test_tokens_listed_in_the_settings_are_added_in_the_order_of_their_ids(
    tmp_path: pathlib.Path,
) -> None:
    listed = {"10": {"content": "<y>", "special": True}, "9": {"content": "<x>", "special": False}}
    tokenizer = Tokenizer.from_folder(_write(tmp_path, added_tokens_decoder=listed))
    assert tokenizer.encode("<x><y>") == [3, 4]
    assert tokenizer.decode([3, 4]) == "<x>"


def test_older_folders_name_their_special_tokens_apart(tmp_path: pathlib.Path) -> None:
    _write(tmp_path, eos_token="a")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "b"}}))
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named_with_its_folder(tmp_path: pathlib.Path, name: str) -> None:
    (_write(tmp_path) / name).unlink()
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no {name}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_broken_file_is_named(tmp_path: pathlib.Path, name: str, content: bytes) -> None:
    (_write(tmp_path) / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)


def test_a_prompt_of_many_characters_and_few_tokens_is_taken(tmp_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.from_folder(_write(tmp_path))
    text = "a" + " " * 100_000 + "b"
    assert tokenizer.encode_prompt(text, 4) == [0, 1]


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers(byte_tokenizer: Tokenizer) -> None:
    assert len(byte_tokenizer.encode_prompt("x" * 4608, 64)) == 4608
    text = "5000000 characters, and its first 4608 make 4608 tokens already; max_model_len = 64"
    with pytest.raises(CapacityError, match=text):
        byte_tokenizer.encode_prompt("x" * 5_000_000, 64)


@pytest.mark.parametrize("name", ["self", "return_tensors", "continue_final_message"])
def test_what_a_template_would_not_see_is_refused(byte_tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match=f"may not set {name}"):
        byte_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], **{name: True})


def test_long_texts_are_encoded_and_decoded_as_short_ones(byte_tokenizer: Tokenizer) -> None:
    text = "naïve 漢字 " * 1000
    pieces = [byte_tokenizer.encode(text[at : at + 9], False) for at in range(0, len(text), 9)]
    ids = byte_tokenizer.encode(text, False)
    assert ids == sum(pieces, [])
    assert byte_tokenizer.decode(ids) == text
    with pytest.raises(RequestError, match="half a surrogate pair"):
        byte_tokenizer.encode("a" * 5000 + "\ud800")


class CountingBackend:
    """A backend of the library, and how often each of its methods was called."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.calls: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._backend, name)


def test_long_texts_go_the_way_that_frees_other_threads(byte_folder: pathlib.Path) -> None:
    """`encode` and `decode` of the library keep the GIL: for seconds, of a million characters."""
    tokenizer = Tokenizer.from_folder(byte_folder)
    backend = CountingBackend(tokenizer._backend)
    tokenizer._backend = backend  # type: ignore[assignment]
    ids = tokenizer.encode("x" * 2**16)
    tokenizer.decode(ids)
    assert backend.calls == {"encode_batch_fast": 1, "decode_batch": 1}
    backend.calls.clear()
    tokenizer.decode(tokenizer.encode("x"))
    assert backend.calls == {"encode": 1, "decode": 1}
