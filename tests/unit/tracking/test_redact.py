"""Secrets leave neither as data nor as text (TRK-07)."""

from __future__ import annotations

import pytest

from pipeline.tracking.redact import HIDDEN, redact, redact_text

pytestmark = pytest.mark.case("TRK-07")


def test_named_secrets_at_any_depth_and_nothing_else() -> None:
    tree = {
        "draft": {"mask_token_id": 5, "eos_token": "<|im_end|>", "block_size": 7},
        "answers": {"max_new_tokens": 48, "api_key_env": "OPENAI_API_KEY"},
        "deep": [{"er": ({"api_key": "abc"}, {"hf_token": "xyz", "token": "t", "DB_PASSWORD": "p", "token_count": 3})}],
    }
    clean = redact(tree)
    assert clean["draft"] == tree["draft"] and clean["answers"] == tree["answers"]
    first, second = clean["deep"][0]["er"]
    assert first == {"api_key": HIDDEN}
    assert second == {"hf_token": HIDDEN, "token": HIDDEN, "DB_PASSWORD": HIDDEN, "token_count": 3}
    assert redact({"password": ["a", "b"], "secret": {"value": "c"}}) == {"password": HIDDEN, "secret": HIDDEN}


def test_credentials_in_uris_and_known_shapes() -> None:
    assert redact("http://me:pa55@host:5000/x") == f"http://{HIDDEN}@host:5000/x"
    assert redact("https://hf.example/a/b") == "https://hf.example/a/b"
    assert "hf_" not in redact_text("used hf_" + "a" * 30 + " to log in")


def test_values_of_secret_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "correct-horse-battery")
    assert redact({"note": "sent correct-horse-battery along"}) == {"note": f"sent {HIDDEN} along"}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("  api_key: abc123\n  steps: 4", f"  api_key: {HIDDEN}\n  steps: 4"),
        ('{"password": "abc", "mask_token_id": 5}', f'{{"password": "{HIDDEN}", "mask_token_id": 5}}'),
        ("pipe:curl -H 'Authorization: Bearer ab.cd' h/{}", f"pipe:curl -H 'Authorization: {HIDDEN}' h/{{}}"),
        ('passphrase: "two words" # mine', f'passphrase: "{HIDDEN}" # mine'),
        ("https://h/x?part=3&X-Amz-Signature=ab1 and", f"https://h/x?part=3&X-Amz-Signature={HIDDEN} and"),
        ("https://h/x?part=3&sig=ab1", f"https://h/x?part=3&sig={HIDDEN}"),
        ("hf_token: null", "hf_token: null"),
        ("pad_token: <pad>", "pad_token: <pad>"),
        ("tokens: {max_length: 64}", "tokens: {max_length: 64}"),
    ],
)
def test_text(text: str, clean: str) -> None:
    assert redact_text(text) == clean
