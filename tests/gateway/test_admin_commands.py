"""What `forebay admin` makes of its command line, before any server is asked."""

import pytest
from forebay_gateway.admin.main import main
from forebay_shared.settings import StartError


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "http://127.0.0.1:1", "whoami"],
        ["whoami", "--url", "http://127.0.0.1:1"],
        ["usage", "--url=http://127.0.0.1:1", "--by", "team"],
        ["keys", "list", "--team", "red", "--url", "http://127.0.0.1:1"],
    ],
)
def test_the_server_may_be_named_before_the_command_or_behind_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", "sk-owner")
    with pytest.raises(StartError, match=r"no gateway answers at http://127\.0\.0\.1:1:"):
        main(arguments)


def test_an_option_that_is_none_is_named() -> None:
    with pytest.raises(StartError, match="unrecognized arguments: --uri x"):
        main(["whoami", "--uri", "x"])
