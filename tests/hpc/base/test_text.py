"""Text from outside on a terminal and in a spreadsheet."""

import pytest

from hpc.base.text import csv_cell, csv_text, visible, without_secrets, words_without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\nb\rc\x00\x7f", r"a\nb\rc\x00\x7f"),
        ("\x9b2J", r"\x9b2J"),
        ("safe\u202eexe.txt\u2066", r"safe\u202eexe.txt\u2066"),
        ("\udcff", r"\udcff"),
        ("tab\tand Größe, 図, 😀", "tab\tand Größe, 図, 😀"),
    ],
)
def test_control_characters_are_seen(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''-1"])
def test_text_that_would_be_a_formula_is_escaped_and_read_back(text: str) -> None:
    assert csv_cell(text) == "'" + text
    assert csv_text(f"'{text}") == text


@pytest.mark.parametrize("cell", ["cat", "", "a=b", "'quoted'", 5, -5, -0.5, None])
def test_other_cells_stay(cell: object) -> None:
    assert csv_cell(cell) == cell
    if isinstance(cell, str):
        assert csv_text(cell) == cell


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export WANDB_API_KEY=abc", "export WANDB_API_KEY=***"),
        ("export A=1 hf_token='a b' B=2", "export A=1 hf_token=*** B=2"),
        ('DB_PASSWORD="a \\" b"; python prep.py', "DB_PASSWORD=***; python prep.py"),
        ("AWS_SECRET_ACCESS_KEY=a'b c'd\\ e&&true", "AWS_SECRET_ACCESS_KEY=***&&true"),
        ("SECRET_1+=a", "SECRET_1+=***"),
        ("export X=${MY_TOKEN:-abc} HF_TOKEN=${HF_TOKEN:-abc}", "export X=${MY_TOKEN:-***} HF_TOKEN=***"),
        ("huggingface-cli login --token abc --add", "huggingface-cli login --token *** --add"),
        ("export http_proxy=http://me:abc@proxy:80", "export http_proxy=http://me:***@proxy:80"),
        # What is no secret stays.
        ("export HF_TOKEN=$(cat ~/.token)", "export HF_TOKEN=$(cat ~/.token)"),
        ('export HF_TOKEN="$MY_TOKEN" A=${TOKEN}', 'export HF_TOKEN="$MY_TOKEN" A=${TOKEN}'),
        ("export TOKENIZERS_PARALLELISM=false MONKEY=1", "export TOKENIZERS_PARALLELISM=false MONKEY=1"),
        ("source keys.sh; unset HF_TOKEN", "source keys.sh; unset HF_TOKEN"),
    ],
)
def test_line_is_shown_without_secrets(line: str, expected: str) -> None:
    assert without_secrets(line) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["t.py", "--hf_token", "a b", "--lr=1"], ["t.py", "--hf_token", "***", "--lr=1"]),
        (["t.py", "--api-key=a b", "wandb.password=x"], ["t.py", "--api-key=***", "wandb.password=***"]),
        (["t.py", "--set", "a=1 token=x y"], ["t.py", "--set", "a=1 token=*** y"]),
        (["--use-token", "--key-dim", "64", "--max-tokens=128", "key=2"],) * 2,
    ],
)
def test_command_line_is_shown_without_secrets(words: list[str], expected: list[str]) -> None:
    assert list(words_without_secrets(words)) == expected
