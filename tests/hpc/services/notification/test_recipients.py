"""The user's file of recipients."""

from pathlib import Path

import pytest
from support.message_server import write_recipients

from hpc.base.errors import UserError
from hpc.services.notification.recipients import choose_recipients

# What apprise imports, on Python before 3.13.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def refusal(*names: str) -> str:
    with pytest.raises(UserError) as refused:
        choose_recipients(names)
    return str(refused.value)


def test_names_are_chosen_once_and_all_means_every_one(home: Path) -> None:
    write_recipients(home, hook="json://host/secret", mail="mailto://smtp.example.org?from=a@b.cd&to=e@f.gh")
    assert choose_recipients(["hook", "hook"]) == {"hook": "JSON"}
    assert choose_recipients(["mail", "all"]) == {"mail": "E-Mail", "hook": "JSON"}


def test_nothing_is_needed_for_nobody(home: Path) -> None:
    assert choose_recipients([]) == {}
    assert "does not exist" in refusal("hook")
    assert f"chmod 600 {home}/torchrelay-notify.yaml" in refusal("hook")


def test_file_that_others_can_read_is_refused(home: Path) -> None:
    path = write_recipients(home, hook="json://host/secret")
    for mode in (0o640, 0o604):
        path.chmod(mode)
        assert f"type chmod 600 {path}" in refusal("hook")


def test_wrong_name_lists_the_right_ones(home: Path) -> None:
    write_recipients(home, hook="json://host/secret", slack="slack://A/B/C")
    assert refusal("slak").endswith("use hook, slack, or all")
    assert "a recipient is a name, not an address" in refusal("slack://A/B/C")


@pytest.mark.parametrize(
    "text",
    [
        'hook: "json://secret\n',
        "- json://secret\n",
        "hook: [json://secret]\n",
        "all: json://secret\n",
        "a/b: json://secret\n",
        "hook: jsson://secret\n",
    ],
)
def test_damaged_file_is_refused_without_a_word_of_what_is_in_it(home: Path, text: str) -> None:
    write_recipients(home).write_text(text)
    message = refusal("hook")
    assert str(home / "torchrelay-notify.yaml") in message
    assert "secret" not in message
    assert "\n" not in message
